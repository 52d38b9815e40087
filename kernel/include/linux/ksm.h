/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/ksm: merging of pages that the caller names.
 *
 * See Documentation/admin-guide/mm/ksm.rst.
 */
#ifndef _UAPI_LINUX_KSM_H
#define _UAPI_LINUX_KSM_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define KSM_ABI_VERSION		1

/* At most this many ranges, and pages in all of them, are done by one call. */
#define KSM_MERGE_MAX_RANGES	65536
#define KSM_MERGE_MAX_PAGES	262144

/* The outcome of one page of a range, as a byte at ksm_merge_range.page_status. */
enum ksm_page_status {
	/* The call ended before this page: see ksm_merge_range.nr_done. */
	KSM_PAGE_UNTRIED	= 0,
	/* The contents were equal. Both addresses now share the kept page. */
	KSM_PAGE_MERGED		= 1,
	/* Both addresses shared one page already. Nothing was changed. */
	KSM_PAGE_SHARED		= 2,
	/* The contents are not equal. Both sides are as before. */
	KSM_PAGE_DIFFERS	= 3,
	/*
	 * No anonymous page is present at one of the addresses: never touched,
	 * swapped out, being migrated, the zero page, a page of a file.
	 */
	KSM_PAGE_ABSENT		= 4,
	/*
	 * One of the pages is in use in a way that forbids it for now: pinned
	 * (for example by O_DIRECT), locked, isolated, or in a per-CPU batch;
	 * or a huge page could not be split. It may work later.
	 */
	KSM_PAGE_BUSY		= 5,
	/*
	 * One of the mappings can never have merged pages (the same as
	 * MADV_MERGEABLE silently ignores), or the pages are on different
	 * nodes and merge_across_nodes is 0.
	 */
	KSM_PAGE_INELIGIBLE	= 6,
	/* The kept page has max_page_sharing sharers: name another one. */
	KSM_PAGE_FULL		= 7,
	/* One of the addresses is not mapped. */
	KSM_PAGE_GONE		= 8,
	/*
	 * More than ksm_merge_range.keep_mappers processes map the kept page,
	 * or others may have it swapped out: name another one.
	 */
	KSM_PAGE_FOREIGN	= 9,
};

/*
 * Keep the one page at keep_addr for all pages of the range. If the address is
 * in the taken range itself, that page is KSM_PAGE_SHARED.
 */
#define KSM_MERGE_KEEP_ONE	(1U << 0)
/*
 * Keep the zero page, so that only pages of zeros are merged, whatever
 * use_zero_pages says. keep_pidfd must be -1 and keep_addr 0.
 */
#define KSM_MERGE_ZERO		(1U << 1)

/**
 * struct ksm_merge_range - pages to merge
 * @keep_addr: address of the first page that stays, a multiple of the page size
 * @take_addr: address of the first page that is replaced by the one that stays
 * @nr_pages: number of pages on each side, at least 1
 * @page_status: address of @nr_pages bytes which receive an
 *	enum ksm_page_status each, or 0. Only the first @nr_done are written.
 * @nr_done: out: number of pages tried. Less than @nr_pages if the range failed
 *	(@status) or the call ended early (a signal, KSM_MERGE_MAX_PAGES).
 * @nr_merged: out: number of pages whose outcome was KSM_PAGE_MERGED
 * @keep_pidfd: process of @keep_addr
 * @take_pidfd: process of @take_addr; may be the same
 * @flags: KSM_MERGE_KEEP_ONE, KSM_MERGE_ZERO
 * @status: out: 0, or why the range ended at @nr_done, a negative errno:
 *	-EBADF: not a pidfd
 *	-ESRCH: the process has exited
 *	-EACCES: the caller may not access the process's memory (as for
 *		ptrace(2): PTRACE_MODE_ATTACH_FSCREDS)
 *	-EPERM: the process is not the caller and the caller has no
 *		CAP_SYS_NICE
 *	-EINVAL: an unaligned or wrapping address, no pages, both sides
 *		overlap, an unknown flag, @keep_mappers with KSM_MERGE_ZERO, a
 *		reserved field that is not 0
 *	-EBUSY: everything is being unmerged (2 in /sys/kernel/mm/ksm/run)
 *	-ENOMEM: out of memory
 *	-EFAULT: @page_status cannot be written; the pages are merged all the
 *		same, and counted
 * @keep_mappers: 0: any number. Else at most this many mappings may have a kept
 *	page that is no KSM page yet. After fork, processes that the caller does
 *	not know may share it, and would have a merged page from then on.
 * @reserved: must be 0
 *
 * Nothing is compared before all permissions have been checked. What has
 * been merged when the range fails stays merged. A page that is not merged is
 * as it was, but for those of a huge page of which an equal page was named: it
 * is split, and its other pages of zeros may become the zero page. A mapping
 * of which a page is named is marked mergeable as a whole before anything is
 * compared, as MADV_MERGEABLE does, unless it is marked already, and
 * MADV_UNMERGEABLE undoes that and the merges.
 */
struct ksm_merge_range {
	__u64 keep_addr;
	__u64 take_addr;
	__u64 nr_pages;
	__u64 page_status;
	__u64 nr_done;
	__u64 nr_merged;
	__s32 keep_pidfd;
	__s32 take_pidfd;
	__u32 flags;
	__s32 status;
	__u32 keep_mappers;
	__u32 reserved;
};

/**
 * struct ksm_merge - argument of KSM_IOC_MERGE
 * @version: KSM_ABI_VERSION
 * @range_size: sizeof(struct ksm_merge_range)
 * @ranges: address of the ranges
 * @nr_ranges: their number. With 0, only @version and @range_size are checked.
 * @reserved: must be 0
 *
 * The ioctl returns the number of ranges done, whose fields marked "out" have
 * been written, and which may have failed or, the last one, be incomplete. It
 * is less than @nr_ranges if a signal arrived or KSM_MERGE_MAX_PAGES were
 * tried: go on with the first range not done and, if the last one was cut
 * short (nr_done < nr_pages, status 0), the rest of that one.
 *
 * Fails only if nothing was done: EINTR (a signal), EINVAL (@version,
 * @range_size or @reserved is unknown), E2BIG (@nr_ranges exceeds
 * KSM_MERGE_MAX_RANGES), EFAULT, ENOMEM.
 */
struct ksm_merge {
	__u32 version;
	__u32 range_size;
	__u64 ranges;
	__u32 nr_ranges;
	__u32 reserved;
};

/**
 * struct ksm_hash - argument of KSM_IOC_HASH
 * @version: KSM_ABI_VERSION
 * @flags: must be 0
 * @pidfd: the process, under the permissions of KSM_IOC_MERGE
 * @from: number of cache lines in the hashes that are at @hashes already, 0 if
 *	there are none
 * @to: number of cache lines that the hashes shall cover, at most
 *	KSM_HASH_LINES; less than @from takes lines out of them
 * @reserved: must be 0
 * @addr: address of the first page, a multiple of the page size
 * @nr_pages: number of pages
 * @key: determines the order in which lines are added, and the function
 * @hashes: address of @nr_pages __u64. 0 is no hash: out, no anonymous page is
 *	present, or it is in a mapping that can never have merged pages; in,
 *	with @from not 0, the page is passed over.
 * @nr_done: out: number of hashes written
 *
 * Nothing is changed by this, not even the accessed bits. KSM_PAGE_ABSENT and
 * the like are not told apart.
 *
 * The hash is defined as follows, in unsigned 64-bit arithmetic. mix(x) is
 * the finalizer of SplitMix64. Let k[i] = mix(key + (i + 1) * KSM_HASH_GOLDEN)
 * for i = 0..8. Line number n of a page is at 64 * ((n * (k[8] | 1) + (k[8] >>
 * 32)) % KSM_HASH_LINES); a line is eight native words w[0..7]. fold(a, b) is
 * the exclusive or of the high and the low half of the 128-bit product a * b.
 *
 *	line = fold(w[0] ^ k[0], w[1] ^ k[1]) + ... + fold(w[6] ^ k[6], w[7] ^ k[7])
 *	hash(0) = key
 *	hash(n + 1) = rotate_left((hash(n) ^ line(n)) * KSM_HASH_GOLDEN, 29)
 *
 * so that one more line, or one less, costs that line only.
 *
 * The ioctl returns 0 if it did a part at least: @nr_done is less than
 * @nr_pages if a signal arrived or KSM_MERGE_MAX_PAGES were done. Fails with
 * the errors of struct ksm_merge_range.status.
 */
struct ksm_hash {
	__u32 version;
	__u32 flags;
	__s32 pidfd;
	__u16 from;
	__u16 to;
	__u64 reserved;
	__u64 addr;
	__u64 nr_pages;
	__u64 key;
	__u64 hashes;
	__u64 nr_done;
};

/* For pages of 4 KiB; in general the page size divided by 64. */
#define KSM_HASH_LINES		64
#define KSM_HASH_GOLDEN		0x9e3779b97f4a7c15ULL

#define KSM_IOC_MAGIC		0xB9
#define KSM_IOC_MERGE		_IOWR(KSM_IOC_MAGIC, 0x00, struct ksm_merge)
#define KSM_IOC_HASH		_IOWR(KSM_IOC_MAGIC, 0x01, struct ksm_hash)

#endif /* _UAPI_LINUX_KSM_H */
