/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Kernels whose mm/ksm.c, and callers of what this module uses, somebody has read and the tests have passed on: the outputs of
 * `uname -r` and `uname -v`, the newest first. See README.md for how to add one.
 */
#define REVIEWED \
	{ "6.12.117+deb12-cloud-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.12.117-1~deb12u1 (2026-11-14)" }, \

