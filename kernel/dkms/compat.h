/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What differs between the kernels that request.c is for, Linux 6.12, 7.2 and 7.3. It uses the names of the newest.
 */
#ifndef KSM_REQUEST_COMPAT_H
#define KSM_REQUEST_COMPAT_H

#include <linux/version.h>

#if __has_include(<linux/pagevec.h>)
#include <linux/pagevec.h>
#define FOLIO_BATCH_SIZE	PAGEVEC_SIZE
#endif

#ifdef PAGE_MAPPING_KSM
#define FOLIO_MAPPING_KSM	PAGE_MAPPING_KSM
#define FOLIO_MAPPING_FLAGS	PAGE_MAPPING_FLAGS
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(7, 0, 0)
#define mm_flags_test(flag, mm)		test_bit(flag, &(mm)->flags)
#define mm_flags_clear(flag, mm)	clear_bit(flag, &(mm)->flags)
#define zero_pfn(addr)			my_zero_pfn(addr)
#define COMPAT_FUNCTIONS(F)		F(pte_offset_map_nolock) F(split_huge_page_to_list_to_order)
#define map_table(mm, pmd, addr, ptl)	K(pte_offset_map_nolock)(mm, pmd, addr, ptl)
#define split_page_fully(page)		K(split_huge_page_to_list_to_order)(page, NULL, 0)
#else
#define COMPAT_FUNCTIONS(F)		F(pte_offset_map_rw_nolock) F(__split_huge_page_to_list_to_order)
/* The caller compares the pmd itself */
#define map_table(mm, pmd, addr, ptl)	({ pmd_t now; K(pte_offset_map_rw_nolock)(mm, pmd, addr, &now, ptl); })
#define split_page_fully(page)		K(__split_huge_page_to_list_to_order)(page, NULL, 0)
#define get_anon_vma(anon_vma)		atomic_inc(&(anon_vma)->refcount)
#endif

/* A record in the stable tree has the index of the page that was there, by which rmap finds VMAs; before, it looks at all. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(7, 3, 0)
#define RMAP_ITEM_STATE		unsigned int oldchecksum; u8 age; u8 remaining_skips
#define set_index(item, index)	((void)(index))
#define linear_anon_page_index	linear_page_index
#define pte_uffd(pte)		pte_uffd_wp(pte)
#define pte_mkuffd(pte)		pte_mkuffd_wp(pte)
#define userfaultfd_rwp(vma)	false
#else
#define RMAP_ITEM_STATE		union { struct { unsigned int oldchecksum; u8 age; u8 remaining_skips; }; \
					unsigned long linear_page_index; }
#define set_index(item, index)	((item)->linear_page_index = (index))
#endif

#endif
