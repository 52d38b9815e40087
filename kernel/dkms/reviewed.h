/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Debian's kernels whose mm/ksm.c, and callers of what this module uses, somebody has read, and the first and last of which have
 * passed the tests: distribution, series (major * 100 + minor), first and last version, and the starts of two SHA-256: of mm/ksm.c,
 * and of what else is used, both as scripts/dkms survey takes them. A range ends where somebody has looked, and is of the first
 * package of each version only. See README.md for how to add one.
 */
#define REVIEWED \
	{ "deb12", 612, 117, 117 }, /* 2474a688c3d6 31e4d4a97ab7 */ \
	{ "deb13", 612, 107, 107 }, /* 2474a688c3d6 75f1c70c22a5 */ \
	{ "deb13", 612, 118, 118 }, /* 6c7754cae37d 8d67c3015841 */ \
	{ "deb13", 703, 4, 4 }, /* b783b08af2db 0cdcd85a75f8 */ \
	{ "deb13", 702, 12, 12 }, /* 4aee1ddc94c6 22f24ec63286 */ \

