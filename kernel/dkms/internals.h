/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What is private to mm/ksm.c and mm/, as the kernels in reviewed.h have it. btf.c compares every type and prototype in here, and those of all
 * symbols named below, with the kernel's BTF when the module is built. See README.md before changing anything.
 */
#ifndef KSM_REQUEST_INTERNALS_H
#define KSM_REQUEST_INTERNALS_H

#include <linux/mm.h>
#include <linux/rmap.h>
#include <linux/static_call.h>
#include "compat.h"

struct mm_slot {
	struct hlist_node hash;
	struct list_head mm_node;
	struct mm_struct *mm;
};

struct ksm_mm_slot {
	struct mm_slot slot;
	struct ksm_rmap_item *rmap_list;
};

struct ksm_scan {
	struct ksm_mm_slot *mm_slot;
	unsigned long address;
	struct ksm_rmap_item **rmap_list;
	unsigned long seqnr;
};

struct ksm_stable_node {
	union {
		struct rb_node node;
		struct {
			struct list_head *head;
			struct {
				struct hlist_node hlist_dup;
				struct list_head list;
			};
		};
	};
	struct hlist_head hlist;
	union {
		unsigned long kpfn;
		unsigned long chain_prune_time;
	};
	int rmap_hlist_len;
#ifdef CONFIG_NUMA
	int nid;
#endif
};

struct ksm_rmap_item {
	struct ksm_rmap_item *rmap_list;
	union {
		struct anon_vma *anon_vma;
#ifdef CONFIG_NUMA
		int nid;
#endif
	};
	struct mm_struct *mm;
	unsigned long address;
	RMAP_ITEM_STATE;
	union {
		struct rb_node node;
		struct {
			struct ksm_stable_node *head;
			struct hlist_node hlist;
		};
	};
};

#define STABLE_FLAG		0x200
#define KSM_RUN_UNMERGE		2
#define KSM_RUN_OFFLINE		4

enum ksm_get_folio_flags {
	KSM_GET_FOLIO_NOLOCK,
	KSM_GET_FOLIO_LOCK,
	KSM_GET_FOLIO_TRYLOCK
};

/* Not in a header, or not for modules */
void flush_tlb_mm_range(struct mm_struct *mm, unsigned long start, unsigned long end, unsigned int stride_shift,
			bool freed_tables);
struct folio *ksm_get_folio(struct ksm_stable_node *stable_node, enum ksm_get_folio_flags flags);
void remove_rmap_item_from_tree(struct ksm_rmap_item *rmap_item);
void stable_tree_append(struct ksm_rmap_item *rmap_item, struct ksm_stable_node *stable_node, bool max_page_sharing_bypass);
pmd_t *mm_find_pmd(struct mm_struct *mm, unsigned long address);

#ifdef CONFIG_MMU_NOTIFIER
#define NOTIFIER_FUNCTIONS(F) F(__mmu_notifier_invalidate_range_start) F(__mmu_notifier_invalidate_range_end)
#else
#define NOTIFIER_FUNCTIONS(F)
#endif

/* The kernel's functions that are not exported, called as K(name)(arguments) */
#define FUNCTIONS(F) \
	F(ksm_get_folio) F(remove_rmap_item_from_tree) F(stable_tree_append) F(__ksm_enter) F(mm_find_pmd) \
	F(folio_walk_start) F(vm_normal_page) F(folio_add_anon_rmap_ptes) F(folio_remove_rmap_ptes) \
	F(flush_tlb_mm_range) NOTIFIER_FUNCTIONS(F) \
	COMPAT_FUNCTIONS(F) F(folio_free_swap) F(lru_add_drain_all) F(mm_access) F(pidfd_get_task)

/* Its variables, as k_name, pointers to them */
#define VARIABLES(V) \
	V(struct mutex, ksm_thread_mutex) V(spinlock_t, ksm_mmlist_lock) V(struct ksm_scan, ksm_scan) \
	V(struct ksm_mm_slot, ksm_mm_head) V(struct list_head, migrate_nodes) V(struct kmem_cache *, rmap_item_cache) \
	V(struct kmem_cache *, stable_node_cache) V(unsigned long, ksm_rmap_items) V(unsigned long, ksm_run) V(unsigned long, ksm_pages_shared) \
	V(unsigned int, ksm_merge_across_nodes) V(int, ksm_max_page_sharing) V(atomic_long_t, ksm_zero_pages)

/* Static functions have no ENDBR: a call through a pointer would trap. Those of static_call() are direct. */
#define K(name) static_call(k_##name)

#endif
