// SPDX-License-Identifier: GPL-2.0
/*
 * The module for kernels that request.c does not know: it refuses to be loaded. Builds on any kernel, so that DKMS, and with it the
 * installation of that kernel, does not fail.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/module.h>
#include <linux/utsname.h>

static int __init unknown_init(void)
{
	pr_warn("refused: Linux %s is not known, or libc6-dev was missing: see the make.log of DKMS\n", init_utsname()->release);
	return -ENODEV;
}

module_init(unknown_init);
MODULE_DESCRIPTION("/dev/ksm, for an unknown kernel: does nothing");
MODULE_LICENSE("GPL");
