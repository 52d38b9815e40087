// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/ksm for stock kernels: merging of pages that the caller names. See README.md, and abi.h for the interface.
 *
 * Up to MERGE_BATCH pairs of two page tables are done at once: under both page table locks, their ptes are made read-only, the
 * pages compared, and the final ptes set. So nothing is ever half done, and what does not merge is as it was. The kernel series beside this does it in the same way, with the same names.
 *
 * KSM knows the pages as its own: they have stable nodes, on migrate_nodes, and rmap_items in the sorted list of their mm.
 *
 * ksm_thread_mutex is held, so that ksmd, or another caller, never sees pages in between; then the mmap_locks of both
 * processes, the locks of the folios (only tried), and the page table locks.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/dax.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/hashtable.h>
#include <linux/hugetlb.h>
#include <linux/kprobes.h>
#include <linux/ksm.h>
#include <linux/mman.h>
#include <linux/miscdevice.h>
#include <linux/mmu_notifier.h>
#include <linux/module.h>
#include <linux/pagewalk.h>
#include <linux/pid.h>
#include <linux/ptrace.h>
#include <linux/rmap.h>
#include <linux/sched/mm.h>
#include <linux/swap.h>
#include <linux/tracepoint.h>
#include <linux/uaccess.h>
#include <linux/userfaultfd_k.h>
#include <linux/utsname.h>
#include <linux/wait_bit.h>
#include <linux/workqueue.h>
#include <asm/tlbflush.h>
#include "abi.h"
#include "internals.h"
#include "reviewed.h"

#define DEFINE_FUNCTION(name) DEFINE_STATIC_CALL_NULL(k_##name, name);
FUNCTIONS(DEFINE_FUNCTION)
#define DEFINE_VARIABLE(type, name) static type *k_##name;
VARIABLES(DEFINE_VARIABLE)

static unsigned long pages_merged;
module_param(pages_merged, ulong, 0444);
MODULE_PARM_DESC(pages_merged, "how many pages have been merged by this module");

/* mm_slots_hash, which khugepaged has, too: found by the self-test */
#define SLOTS_HASH_BITS		10
static struct hlist_head *slots_hash;

/* Inline functions of the kernel's headers call what is not exported. These are the same, without tracing. */
static void notifier_start(struct mmu_notifier_range *range)
{
#ifdef CONFIG_MMU_NOTIFIER
	if (mm_has_notifiers(range->mm)) {
		range->flags |= MMU_NOTIFIER_RANGE_BLOCKABLE;
		K(__mmu_notifier_invalidate_range_start)(range);
	}
#endif
}

static void notifier_end(struct mmu_notifier_range *range)
{
#ifdef CONFIG_MMU_NOTIFIER
	if (mm_has_notifiers(range->mm))
		K(__mmu_notifier_invalidate_range_end)(range);
#endif
}

static void flush_range(struct vm_area_struct *vma, unsigned long start, unsigned long end)
{
	K(flush_tlb_mm_range)(vma->vm_mm, start, end, PAGE_SHIFT, false);
}

/* folio_walk_end() for mappings without huge TLB pages */
static void folio_walk_done(struct folio_walk *fw)
{
	spin_unlock(fw->ptl);
	if (fw->level == FW_LEVEL_PTE)
		pte_unmap(fw->ptep);
}

static struct ksm_stable_node *folio_stable_node(struct folio *folio)
{
	return folio_test_ksm(folio) ? (void *)((unsigned long)folio->mapping & ~FOLIO_MAPPING_FLAGS) : NULL;
}

static void folio_set_stable_node(struct folio *folio, struct ksm_stable_node *node)
{
	folio->mapping = (void *)((unsigned long)node | FOLIO_MAPPING_KSM);
}

/* As in mm/ksm.c, and neither shadow stacks nor what userfaultfd protects from reading: their ptes are like no others */
static bool vma_ksm_compatible(struct vm_area_struct *vma)
{
	return !(vma->vm_flags & (VM_SHARED | VM_MAYSHARE | VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_HUGETLB | VM_MIXEDMAP |
				  VM_DROPPABLE | VM_SHADOW_STACK)) && !vma_is_dax(vma) && !userfaultfd_rwp(vma);
}

/* An rmap_item that is in no list any more */
static void drop_rmap_item(struct ksm_rmap_item *item)
{
	K(remove_rmap_item_from_tree)(item);
	(*k_ksm_rmap_items)--;
	item->mm->ksm_rmap_items--;
	item->mm = NULL;
	kmem_cache_free(*k_rmap_item_cache, item);
}

/* As many as a folio_batch holds */
#define MERGE_BATCH	FOLIO_BATCH_SIZE
/* ksm_thread_mutex is dropped after this many pages */
#define MERGE_CHUNK	1024

/* Beside enum ksm_page_status, within merge_batch() only */
#define MERGE_LARGE	0xfe
#define MERGE_PENDING	0xff

/* One side of a merge */
struct merge_side {
	int pidfd;
	struct mm_struct *mm;
	unsigned long addr;
	struct vm_area_struct *vma;
	pmd_t *pmd, pmdval;
	pte_t *pte;
	spinlock_t *ptl;		/* of that page table */
	struct mmu_notifier_range range;
	struct merge_page {
		struct folio *folio;
		pte_t entry;			/* if the pte is another */
		struct ksm_rmap_item *item;	/* if it got one */
		bool cleared, protected;	/* the pte */
		bool exclusive;			/* the page was, before that */
		bool locked;
	} page[MERGE_BATCH];
	/* New rmap_items, sorted, and for those that came out of order, lists of this mm's: see end_run() */
	struct ksm_rmap_item *first, *last;
	struct ksm_rmap_item *runs[20];
};

struct merge_ctx {
	struct merge_side keep, take;
	unsigned int flags, most;	/* most: how many may map what is kept */
	bool drained, want_drain;
	bool locked;		/* ksm_thread_mutex is held */
	unsigned int held;	/* pages tried since it is */
	unsigned int nr_items, nr_nodes;
	struct ksm_rmap_item *items[2 * MERGE_BATCH];
	struct ksm_stable_node *nodes[MERGE_BATCH];
	u8 status[MERGE_CHUNK];
};

static __always_inline u64 merge_diff8(const u64 *a, const u64 *b)
{
	return (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) |
	       (a[4] ^ b[4]) | (a[5] ^ b[5]) | (a[6] ^ b[6]) | (a[7] ^ b[7]);
}

/* memcmp_pages() also finds an order, at twice the cost */
static bool merge_pages_equal(struct page *page1, struct page *page2)
{
	u64 *start1 = kmap_local_page(page1), *a = start1;
	u64 *start2 = kmap_local_page(page2), *b = start2;
	u64 *end = a + PAGE_SIZE / sizeof(u64);
	u64 diff = 0;

	for (; !diff && a < end; a += 32, b += 32)
		diff = merge_diff8(a, b) | merge_diff8(a + 8, b + 8) |
		       merge_diff8(a + 16, b + 16) |
		       merge_diff8(a + 24, b + 24);
	kunmap_local(start2);
	kunmap_local(start1);
	return !diff;
}

static __always_inline u64 merge_or8(const u64 *a)
{
	return a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
}

static bool merge_page_is_zero(struct page *page)
{
	u64 *start = kmap_local_page(page), *a = start;
	u64 *end = a + PAGE_SIZE / sizeof(u64);
	u64 bits = 0;

	for (; !bits && a < end; a += 32)
		bits = merge_or8(a) | merge_or8(a + 8) | merge_or8(a + 16) |
		       merge_or8(a + 24);
	kunmap_local(start);
	return !bits;
}

static bool merge_contents_equal(struct page *keep, struct page *take)
{
	return keep ? merge_pages_equal(keep, take) : merge_page_is_zero(take);
}

/* Most pairs that differ do so in one of these eight words, and need no pte changed */
static bool merge_looks_equal(struct page *keep, struct page *take)
{
	u64 *a = kmap_local_page(take);
	u64 *b = kmap_local_page(keep ?: ZERO_PAGE(0));
	u64 diff = 0;
	int i;

	for (i = 0; i < 512; i += 65)
		diff |= READ_ONCE(a[i]) ^ READ_ONCE(b[i]);
	kunmap_local(b);
	kunmap_local(a);
	return !diff;
}

/* Have as many stable nodes and rmap_items as n merges can take */
static bool merge_refill(struct merge_ctx *ctx, unsigned int n)
{
	for (; ctx->nr_items < 2 * n; ctx->nr_items++) {
		ctx->items[ctx->nr_items] = kmem_cache_zalloc(*k_rmap_item_cache, GFP_KERNEL | __GFP_NORETRY | __GFP_NOWARN);
		if (!ctx->items[ctx->nr_items])
			return false;
	}
	for (; ctx->nr_nodes < n; ctx->nr_nodes++) {
		ctx->nodes[ctx->nr_nodes] = kmem_cache_alloc(*k_stable_node_cache, GFP_KERNEL | __GFP_HIGH);
		if (!ctx->nodes[ctx->nr_nodes])
			return false;
	}
	return true;
}

static void merge_free_spare(struct merge_ctx *ctx)
{
	while (ctx->nr_items)
		kmem_cache_free(*k_rmap_item_cache, ctx->items[--ctx->nr_items]);
	while (ctx->nr_nodes)
		kmem_cache_free(*k_stable_node_cache, ctx->nodes[--ctx->nr_nodes]);
}

/* mmap_locks of different processes have no order: never wait with one held */
static int merge_lock_mms(struct mm_struct *a, struct mm_struct *b)
{
	for (;;) {
		if (mmap_read_lock_killable(a))
			return -EINTR;
		if (a == b || mmap_read_trylock(b))
			return 0;
		mmap_read_unlock(a);
		/* A writer whose turn it is may need this CPU */
		cond_resched();
		swap(a, b);
	}
}

static void merge_unlock_mms(struct mm_struct *a, struct mm_struct *b)
{
	mmap_read_unlock(a);
	if (a != b)
		mmap_read_unlock(b);
}

/* Find the VMA of a side, or why it has none. Limit n to what is alike. */
static u8 merge_find_vma(struct merge_side *side, unsigned int *n)
{
	unsigned long addr = side->addr;
	struct vm_area_struct *vma = find_vma(side->mm, addr);

	if (!vma)
		return KSM_PAGE_GONE;
	if (addr < vma->vm_start) {
		*n = min_t(unsigned long, *n, (vma->vm_start - addr) >> PAGE_SHIFT);
		return KSM_PAGE_GONE;
	}
	*n = min_t(unsigned long, *n, (vma->vm_end - addr) >> PAGE_SHIFT);
	if (!vma_ksm_compatible(vma))
		return KSM_PAGE_INELIGIBLE;
	if (!vma->anon_vma)
		return KSM_PAGE_ABSENT;
	side->vma = vma;
	return MERGE_PENDING;
}

/* Find the page table of a side. Limit n to its end. */
static u8 merge_find_table(struct merge_side *side, unsigned int *n)
{
	*n = min_t(unsigned int, *n, PTRS_PER_PTE - pte_index(side->addr));
	side->pmd = K(mm_find_pmd)(side->mm, side->addr);
	if (!side->pmd)
		return KSM_PAGE_ABSENT;
	side->pmdval = pmdp_get_lockless(side->pmd);
	if (!pmd_present(side->pmdval))
		return KSM_PAGE_ABSENT;
	return pmd_leaf(side->pmdval) ? MERGE_LARGE : MERGE_PENDING;
}

static void merge_unlock_tables(struct merge_side *a, struct merge_side *b)
{
	spin_unlock(a->ptl);
	if (a->ptl != b->ptl)
		spin_unlock(b->ptl);
	pte_unmap(b->pte);
	if (a != b)
		pte_unmap(a->pte);
}

/* Map and lock both page tables, in the order of double_pt_lock() */
static bool merge_lock_tables(struct merge_side *a, struct merge_side *b)
{
	spinlock_t *ptl1, *ptl2;

	a->pte = map_table(a->mm, a->pmd, a->addr, &a->ptl);
	if (!a->pte)
		return false;
	if (a != b) {
		b->pte = map_table(b->mm, b->pmd, b->addr, &b->ptl);
		if (!b->pte) {
			pte_unmap(a->pte);
			return false;
		}
	}
	ptl1 = min(a->ptl, b->ptl);
	ptl2 = max(a->ptl, b->ptl);
	spin_lock(ptl1);
	if (ptl1 != ptl2)
		spin_lock_nested(ptl2, SINGLE_DEPTH_NESTING);
	if (pmd_same(a->pmdval, pmdp_get_lockless(a->pmd)) &&
	    pmd_same(b->pmdval, pmdp_get_lockless(b->pmd)))
		return true;
	merge_unlock_tables(a, b);
	return false;
}

static int merge_lock(struct merge_ctx *ctx)
{
	if (ctx->locked)
		return 0;
	if (mutex_lock_interruptible(k_ksm_thread_mutex))
		return -EINTR;
	while (*k_ksm_run & KSM_RUN_OFFLINE) {
		mutex_unlock(k_ksm_thread_mutex);
		if (wait_on_bit(k_ksm_run, ilog2(KSM_RUN_OFFLINE), TASK_INTERRUPTIBLE) ||
		    mutex_lock_interruptible(k_ksm_thread_mutex))
			return -EINTR;
	}
	if (*k_ksm_run & KSM_RUN_UNMERGE) {
		mutex_unlock(k_ksm_thread_mutex);
		return -EBUSY;
	}
	ctx->locked = true;
	ctx->held = 0;
	return 0;
}

static void merge_unlock(struct merge_ctx *ctx)
{
	if (ctx->locked)
		mutex_unlock(k_ksm_thread_mutex);
	ctx->locked = false;
}

/*
 * Mark the VMA of a side, unless it is marked. Returns 1 if locks were dropped: it may be another one by now.
 */
static int merge_mark(struct merge_ctx *ctx, struct merge_side *side)
{
	struct mm_struct *mm = side->mm;
	struct vm_area_struct *vma;
	int err = 0;

	if ((side->vma->vm_flags & VM_MERGEABLE) && mm_flags_test(MMF_VM_MERGEABLE, mm))
		return 0;

	merge_unlock_mms(ctx->flags & KSM_MERGE_ZERO ? mm : ctx->keep.mm,
			 ctx->take.mm);
	/* Others need not wait for the mmap_lock */
	merge_unlock(ctx);
	if (mmap_write_lock_killable(mm))
		return -EINTR;
	vma = vma_lookup(mm, side->addr);
	/* Rarely, fork or ksmd have left a marked VMA in an mm without slot */
	if (!mm_flags_test(MMF_VM_MERGEABLE, mm))
		err = K(__ksm_enter)(mm);
	if (!err && vma && vma_ksm_compatible(vma))
		vm_flags_set(vma, VM_MERGEABLE);
	mmap_write_unlock(mm);
	return err ?: merge_lock(ctx) ?: 1;
}

/* The folio at a pte, or why there is none */
static u8 merge_pick(struct merge_side *side, unsigned int i)
{
	pte_t entry = ptep_get(side->pte + i);
	struct page *page;

	side->page[i].folio = NULL;
	if (!pte_present(entry))
		return KSM_PAGE_ABSENT;
	page = K(vm_normal_page)(side->vma, side->addr + i * PAGE_SIZE, entry);
	if (!page || !PageAnon(page) || is_zone_device_page(page) ||
	    PageHWPoison(page))
		return KSM_PAGE_ABSENT;
	if (PageCompound(page))
		return MERGE_LARGE;
	side->page[i].folio = page_folio(page);
	return MERGE_PENDING;
}

/* Lock a folio and get a reference, unless another page of this batch has */
static bool merge_trylock(struct merge_ctx *ctx, struct merge_page *page,
			  unsigned int n)
{
	page->locked = folio_trylock(page->folio);
	if (page->locked) {
		folio_get(page->folio);
		return true;
	}
	while (n--) {
		struct merge_page *keep = &ctx->keep.page[n];
		struct merge_page *take = &ctx->take.page[n];

		if ((keep->locked && keep->folio == page->folio) ||
		    (take->locked && take->folio == page->folio))
			return true;
	}
	return false;
}

/* Clear a pte, again if it has been made read-only */
static void merge_clear(struct merge_side *side, unsigned int i)
{
	struct merge_page *page = &side->page[i];
	pte_t entry = ptep_get_and_clear(side->mm, side->addr + i * PAGE_SIZE, side->pte + i);

	if (!page->protected)
		page->entry = entry;
	else if (pte_young(entry))
		page->entry = pte_mkyoung(page->entry);
	page->cleared = true;
}

static void merge_restore(struct merge_side *side, unsigned int i)
{
	struct merge_page *page = &side->page[i];

	if (page->protected && !page->cleared && pte_young(ptep_get(side->pte + i)))
		page->entry = pte_mkyoung(page->entry);
	if (page->exclusive)
		SetPageAnonExclusive(&page->folio->page);
	if (page->cleared || page->protected)
		set_pte_at(side->mm, side->addr + i * PAGE_SIZE, side->pte + i, page->entry);
	page->cleared = false;
	page->protected = false;
	page->exclusive = false;
}

/*
 * Nobody but processes that map the folio, swapcache and we have references?
 * See write_protect_page(): the pte has been cleared and flushed, so GUP-fast
 * cannot get new ones.
 */
static bool merge_unpinned(struct merge_ctx *ctx, struct folio *folio)
{
	if (folio_ref_count(folio) ==
	    folio_mapcount(folio) + folio_test_swapcache(folio) + 1)
		return true;
	if (!folio_test_lru(folio))
		ctx->want_drain = true;
	return false;
}

/* As write_protect_page(): make a pte read-only that has been cleared and flushed. GUP-fast pins nothing that is not exclusive. */
static bool merge_protect(struct merge_ctx *ctx, struct merge_side *side, unsigned int i)
{
	struct merge_page *page = &side->page[i];
	struct folio *folio = page->folio;
	bool exclusive = PageAnonExclusive(&folio->page);

	if (!page->cleared)
		return page->protected;
	if (!merge_unpinned(ctx, folio) || (exclusive && folio_try_share_anon_rmap_pte(folio, &folio->page))) {
		merge_restore(side, i);
		return false;
	}
	set_pte_at(side->mm, side->addr + i * PAGE_SIZE, side->pte + i, pte_wrprotect(pte_mkclean(page->entry)));
	page->cleared = false;
	page->protected = true;
	page->exclusive = exclusive;
	return true;
}

static struct ksm_rmap_item *merge_new_item(struct merge_ctx *ctx, struct merge_side *side, unsigned int i)
{
	struct ksm_rmap_item *item = ctx->items[--ctx->nr_items];

	item->mm = side->mm;
	item->mm->ksm_rmap_items++;
	(*k_ksm_rmap_items)++;
	item->address = side->addr + i * PAGE_SIZE;
	side->page[i].item = item;
	return item;
}

static void merge_append(struct merge_ctx *ctx, struct merge_side *side,
			 unsigned int i, struct anon_vma *anon_vma, pgoff_t index,
			 struct ksm_stable_node *node)
{
	struct ksm_rmap_item *item = merge_new_item(ctx, side, i);

	item->anon_vma = anon_vma;
	get_anon_vma(anon_vma);
	set_index(item, index);
	K(stable_tree_append)(item, node, false);
}

/* Make the kept page a KSM page. Its pte is read-only. */
static void merge_keep(struct merge_ctx *ctx, unsigned int k)
{
	struct merge_side *side = &ctx->keep;
	struct merge_page *keep = &side->page[k];
	struct folio *folio = keep->folio;
	struct anon_vma *anon_vma = (void *)((unsigned long)folio->mapping & ~FOLIO_MAPPING_FLAGS);
	struct ksm_stable_node *node;

	VM_WARN_ON_FOLIO(!folio_test_locked(folio), folio);
	/* Its place in the stable tree is for ksmd to find, if it ever runs */
	node = ctx->nodes[--ctx->nr_nodes];
	INIT_HLIST_HEAD(&node->hlist);
	node->kpfn = folio_pfn(folio);
	node->rmap_hlist_len = 0;
	node->nid = *k_ksm_merge_across_nodes ? 0 : folio_nid(folio);
	node->head = k_migrate_nodes;
	list_add(&node->list, k_migrate_nodes);
	/*
	 * After fork, others may map the folio, and not be reached by the
	 * anon_vma of this VMA: take that of the folio.
	 */
	merge_append(ctx, side, k, anon_vma, folio->index, node);
	folio_set_stable_node(folio, node);
	/* Reclaim just frees a clean page: make sure that it is swapped */
	folio_set_dirty(folio);
	/* Its pte stays */
	keep->protected = false;
	keep->exclusive = false;
}

/* Map the kept page instead of the taken one, whose pte is cleared. */
static void merge_take(struct merge_ctx *ctx, unsigned int i,
		       struct folio *kfolio)
{
	struct merge_side *side = &ctx->take;
	struct vm_area_struct *vma = side->vma;
	struct merge_page *take = &side->page[i];
	unsigned long addr = side->addr + i * PAGE_SIZE;
	struct folio *folio = take->folio;
	pte_t old = take->entry, new;

	VM_WARN_ON_FOLIO(!folio_test_locked(folio), folio);
	if (kfolio) {
		VM_WARN_ON_FOLIO(!folio_test_locked(kfolio), kfolio);
		merge_append(ctx, side, i, vma->anon_vma, linear_anon_page_index(vma, addr),
			     folio_stable_node(kfolio));
		folio_get(kfolio);
		K(folio_add_anon_rmap_ptes)(kfolio, &kfolio->page, 1, vma,
					    addr, RMAP_NONE);
		new = mk_pte(&kfolio->page, vma->vm_page_prot);
	} else {
		/* See replace_page() */
		new = pte_mkdirty(pte_mkspecial(pfn_pte(zero_pfn(addr),
							vma->vm_page_prot)));
		atomic_long_inc(k_ksm_zero_pages);
		atomic_long_inc(&side->mm->ksm_zero_pages);
		percpu_counter_dec(&side->mm->rss_stat[MM_ANONPAGES]);
		/* This one leads nowhere: insert_items() takes the old one out of the tree */
		if (folio_test_ksm(folio))
			merge_new_item(ctx, side, i);
	}
	new = pte_young(old) ? pte_mkyoung(new) : pte_mkold(new);
	new = pte_soft_dirty(old) ? pte_mksoft_dirty(new) :
				    pte_clear_soft_dirty(new);
	if (pte_uffd(old))
		new = pte_mkuffd(new);
	take->entry = new;
	take->exclusive = false;
	merge_restore(side, i);

	K(folio_remove_rmap_ptes)(folio, &folio->page, 1, vma);
	folio_put(folio);	/* never the last reference: we have one */
}

/* Merge the pair i, which is equal, and whose kept page is k. The pte of what is taken is cleared. */
static u8 merge_pair(struct merge_ctx *ctx, unsigned int k, unsigned int i)
{
	bool zero = ctx->flags & KSM_MERGE_ZERO;
	struct folio *keep = zero ? NULL : ctx->keep.page[k].folio;

	if (keep && folio_test_ksm(keep)) {
		struct ksm_stable_node *node = folio_stable_node(keep);

		if (!node)
			return KSM_PAGE_BUSY;
		/* ksmd mistakes pages that are full when it first meets them */
		if (node->rmap_hlist_len >= *k_ksm_max_page_sharing - (node->head == k_migrate_nodes))
			return KSM_PAGE_FULL;
	} else if (keep) {
		merge_keep(ctx, k);
	}
	merge_take(ctx, i, keep);
	return KSM_PAGE_MERGED;
}

/*
 * Do at most so many processes map a folio that is locked and no KSM page? With the mmap_lock of one of them held, it forks no more of
 * them. Others may have it swapped out.
 */
static bool merge_known(struct folio *folio, unsigned int most)
{
	if (!most || folio_test_ksm(folio) || PageAnonExclusive(&folio->page))
		return true;
	return folio_mapcount(folio) <= most && !folio_test_swapcache(folio);
}

/* Lock the folios of the pair i, if it can be merged. */
static u8 merge_prepare(struct merge_ctx *ctx, unsigned int k, unsigned int i)
{
	bool zero = ctx->flags & KSM_MERGE_ZERO;
	struct merge_page *keep = &ctx->keep.page[k];
	struct merge_page *take = &ctx->take.page[i];
	u8 status;

	if (!zero && ctx->keep.mm == ctx->take.mm &&
	    ctx->keep.addr + k * PAGE_SIZE == ctx->take.addr + i * PAGE_SIZE)
		return KSM_PAGE_SHARED;
	status = merge_pick(&ctx->take, i);
	if (status == KSM_PAGE_ABSENT && zero) {
		pte_t entry = ptep_get(ctx->take.pte + i);

		if (pte_present(entry) && is_zero_pfn(pte_pfn(entry)))
			return KSM_PAGE_SHARED;
	}
	if (status != MERGE_PENDING)
		return status;
	if (!zero) {
		if (!keep->locked) {
			status = merge_pick(&ctx->keep, k);
			if (status != MERGE_PENDING)
				return status;
		}
		if (keep->folio == take->folio)
			return KSM_PAGE_SHARED;
		if (!*k_ksm_merge_across_nodes && folio_nid(keep->folio) != folio_nid(take->folio))
			return KSM_PAGE_INELIGIBLE;
	}
	if (!merge_looks_equal(zero ? NULL : &keep->folio->page, &take->folio->page))
		return KSM_PAGE_DIFFERS;
	if (!zero && !keep->locked && !merge_trylock(ctx, keep, i))
		return KSM_PAGE_BUSY;
	if (!zero && !merge_known(keep->folio, ctx->most))
		return KSM_PAGE_FOREIGN;
	return merge_trylock(ctx, take, i + 1) ? MERGE_PENDING : KSM_PAGE_BUSY;
}

static struct page *merge_get_page(struct merge_side *side)
{
	struct page *page = NULL;
	struct folio_walk fw;
	struct folio *folio;

	folio = K(folio_walk_start)(&fw, side->vma, side->addr, 0);
	if (!folio)
		return NULL;
	if (folio_test_anon(folio) && !folio_is_zone_device(folio)) {
		page = fw.page;
		get_page(page);
	}
	folio_walk_done(&fw);
	return page;
}

static u8 merge_split_side(struct merge_side *side)
{
	struct page *page = merge_get_page(side);
	u8 status = KSM_PAGE_BUSY;

	if (!page)
		return KSM_PAGE_ABSENT;
	if (!PageCompound(page)) {
		status = MERGE_PENDING;
	} else if (trylock_page(page)) {
		if (!split_page_fully(page))
			status = MERGE_PENDING;
		unlock_page(page);
	}
	put_page(page);
	return status;
}

/*
 * Split the huge pages of a pair, if its contents are equal so that a merge is
 * likely to follow. mmap_locks are held. Returns MERGE_PENDING if it did.
 */
static u8 merge_split(struct merge_ctx *ctx)
{
	struct page *take = merge_get_page(&ctx->take), *keep = NULL;
	bool zero = ctx->flags & KSM_MERGE_ZERO;
	u8 status = KSM_PAGE_ABSENT;

	if (take && !zero)
		keep = merge_get_page(&ctx->keep);
	if (take && (keep || zero))
		status = merge_contents_equal(keep, take) ? MERGE_PENDING :
							    KSM_PAGE_DIFFERS;
	if (take)
		put_page(take);
	if (keep)
		put_page(keep);

	/* One after the other: both pages may be of the same folio */
	if (status == MERGE_PENDING)
		status = merge_split_side(&ctx->take);
	if (status == MERGE_PENDING && !zero)
		status = merge_split_side(&ctx->keep);
	return status;
}

/* All locks but ksm_thread_mutex have been dropped: let go of the folios */
static void merge_release(struct merge_side *side, unsigned int n)
{
	struct folio_batch fbatch;
	unsigned int i;

	folio_batch_init(&fbatch);
	for (i = 0; i < n; i++) {
		struct folio *folio = side->page[i].folio;

		if (!side->page[i].locked)
			continue;
		side->page[i].locked = false;
		if (!folio_mapped(folio))
			K(folio_free_swap)(folio);
		folio_unlock(folio);
		folio_batch_add(&fbatch, folio);
	}
	folios_put(&fbatch);
}

/* Under ksm_mmlist_lock */
static struct mm_slot *slot_of(struct mm_struct *mm)
{
	struct mm_slot *slot;

	hlist_for_each_entry(slot, &slots_hash[hash_long((unsigned long)mm, SLOTS_HASH_BITS)], hash)
		if (slot->mm == mm)
			return slot;
	return NULL;
}

/* It cannot be freed while ksm_thread_mutex and mm_users are held */
static struct ksm_mm_slot *find_slot(struct mm_struct *mm)
{
	struct mm_slot *slot;

	spin_lock(k_ksm_mmlist_lock);
	slot = slot_of(mm);
	spin_unlock(k_ksm_mmlist_lock);
	return slot ? container_of(slot, struct ksm_mm_slot, slot) : NULL;
}

static unsigned long item_address(const struct ksm_rmap_item *item)
{
	return item->address & PAGE_MASK;
}

/* Let others run after so many */
#define RESCHED_STEPS	4096

/* Merge two sorted lists. If both have an address, the older item comes first. */
static struct ksm_rmap_item *merge_runs(struct ksm_rmap_item *older, struct ksm_rmap_item *newer)
{
	struct ksm_rmap_item *first, **link = &first;
	unsigned int steps;

	for (steps = 1; older && newer; steps++) {
		struct ksm_rmap_item **least = item_address(newer) < item_address(older) ? &newer : &older;

		*link = *least;
		link = &(*link)->rmap_list;
		*least = *link;
		if (!(steps % RESCHED_STEPS))
			cond_resched();
	}
	*link = older ?: newer;
	return first;
}

/*
 * Put the sorted items of a side with those before them: runs[i] is a list of the items of 2^i runs, or empty. The higher, the
 * older. If both sides are of one mm, those of the taken side are for both.
 */
static void end_run(struct merge_ctx *ctx, struct merge_side *side)
{
	struct ksm_rmap_item *run = side->first, **at;

	side->first = NULL;
	if (!run)
		return;
	for (at = ctx->keep.mm == ctx->take.mm ? ctx->take.runs : side->runs; *at; at++) {
		run = merge_runs(*at, run);
		*at = NULL;
		cond_resched();
	}
	*at = run;
}

/* Have rmap_items put into the list of their mm, at the end of the call */
static void merge_store_items(struct merge_ctx *ctx, struct merge_side *side, unsigned int n)
{
	struct merge_side *other = side == &ctx->keep ? &ctx->take : &ctx->keep;
	struct ksm_rmap_item *item;
	unsigned int i;

	for (i = 0; i < n; i++) {
		item = side->page[i].item;
		if (!item)
			continue;
		/* If there are several for an address, the last one counts: it must be in a later run */
		if (other->first && other->mm == side->mm && item_address(item) >= item_address(other->first) &&
		    item_address(item) <= item_address(other->last))
			end_run(ctx, other);
		if (side->first && item_address(item) <= item_address(side->last))
			end_run(ctx, side);
		if (side->first)
			side->last->rmap_list = item;
		else
			side->first = item;
		side->last = item;
		item->rmap_list = NULL;
	}
}

/*
 * The list of an mm has no quick access, so we remember some of its items. Nobody frees items of a process that lives but we,
 * ksmd, and run 2: we keep this right, ksmd moves its cursor, and starts its scans where we see it, and run 2 empties the list.
 */
#define INDEX_SIZE	128
#define INDEX_STRIDE	64
struct list_index {
	struct ksm_mm_slot *slot;
	struct mm_struct *mm;
	struct ksm_scan scan;		/* ksmd's cursor */
	unsigned long scans;
	unsigned int stride;		/* between items, at least */
	unsigned int nr;
	struct {
		unsigned long address;
		struct ksm_rmap_item *item;
	} at[INDEX_SIZE];
};
static struct list_index indexes[16];
static unsigned long scans;	/* that ksmd has begun */

/* A way along a list. *link is where it is. */
struct list_walk {
	struct list_index *index;
	struct ksm_rmap_item **link;
	unsigned int passed;		/* items of the index */
	unsigned int steps;		/* since the last one */
};

static void walk_start(struct list_walk *walk, struct ksm_mm_slot *slot)
{
	static unsigned int next;
	struct list_index *index, *end = indexes + ARRAY_SIZE(indexes);

	for (index = indexes; index < end && index->slot != slot; index++)
		;
	if (index == end)
		index = &indexes[next++ % ARRAY_SIZE(indexes)];
	if (index->slot != slot || index->mm != slot->slot.mm || index->scans != scans || !slot->rmap_list ||
	    memcmp(&index->scan, k_ksm_scan, sizeof(index->scan))) {
		index->nr = 0;
		index->stride = INDEX_STRIDE;
	}
	index->slot = slot;
	index->mm = slot->slot.mm;
	*walk = (struct list_walk){ .index = index, .link = &slot->rmap_list };
}

static void walk_end(struct list_walk *walk)
{
	walk->index->scan = *k_ksm_scan;
	walk->index->scans = scans;
}

static void walk_step(struct list_walk *walk)
{
	struct list_index *index = walk->index;
	struct ksm_rmap_item *item = *walk->link;
	unsigned int i;

	walk->link = &item->rmap_list;
	if (++walk->steps < index->stride)
		return;
	cond_resched();
	walk->steps = 0;
	if (index->nr == INDEX_SIZE) {
		for (i = 0; i < INDEX_SIZE / 2; i++)
			index->at[i] = index->at[2 * i + 1];
		index->nr = INDEX_SIZE / 2;
		index->stride *= 2;
		walk->passed /= 2;
	}
	for (i = index->nr++; i > walk->passed; i--)
		index->at[i] = index->at[i - 1];
	index->at[i].address = item_address(item);
	index->at[i].item = item;
	walk->passed++;
}

/* Go on to the first item from an address on. */
static struct ksm_rmap_item *walk_to(struct list_walk *walk, unsigned long addr)
{
	struct list_index *index = walk->index;

	for (; walk->passed < index->nr && index->at[walk->passed].address < addr; walk->passed++) {
		walk->link = &index->at[walk->passed].item->rmap_list;
		walk->steps = 0;
	}
	while (*walk->link && item_address(*walk->link) < addr)
		walk_step(walk);
	return *walk->link;
}

/*
 * While the mutex was dropped, the page at the address of a new rmap_item may have been copied on write, and merged again by ksmd
 * or another caller: then the older one in the list is the newer.
 */
static bool item_outdated(struct mm_struct *mm, struct ksm_rmap_item *old, struct ksm_rmap_item *item)
{
	struct vm_area_struct *vma;
	struct folio_walk fw;
	struct folio *folio = NULL;
	bool outdated = false;

	if (!(old->address & STABLE_FLAG) || ((item->address & STABLE_FLAG) && old->head == item->head))
		return false;
	/* In this order, as ksmd does */
	mmap_read_lock(mm);
	vma = vma_lookup(mm, item_address(item));
	if (vma && vma_ksm_compatible(vma))
		folio = K(folio_walk_start)(&fw, vma, item_address(item), 0);
	if (folio) {
		outdated = folio_stable_node(folio) == old->head;
		folio_walk_done(&fw);
	}
	mmap_read_unlock(mm);
	return outdated;
}

/* Put rmap_items into the sorted list of their mm, in one pass, instead of those that were there for the same addresses */
static void insert_items(struct mm_struct *mm, struct ksm_rmap_item **runs)
{
	struct ksm_rmap_item *items = NULL, *item, *old;
	struct ksm_mm_slot *slot = find_slot(mm);
	struct list_walk walk;
	unsigned int i, steps = 0;
	bool same;

	for (i = 0; i < ARRAY_SIZE(((struct merge_side *)0)->runs); i++) {
		items = merge_runs(runs[i], items);
		runs[i] = NULL;
	}
	if (slot)
		walk_start(&walk, slot);
	while ((item = items)) {
		items = item->rmap_list;
		if (!(++steps % RESCHED_STEPS))
			cond_resched();
		/* While the mutex was dropped, ksmd may have found that nothing is marked */
		if (!slot) {
			drop_rmap_item(item);
			continue;
		}
		old = walk_to(&walk, item_address(item));
		same = old && item_address(old) == item_address(item);
		if (same && item_outdated(mm, old, item)) {
			drop_rmap_item(item);
			continue;
		}
		/* The address has the zero page, or run 2 has unmerged all while the mutex was dropped */
		if (!(item->address & STABLE_FLAG)) {
			if (same)
				K(remove_rmap_item_from_tree)(old);
			drop_rmap_item(item);
			continue;
		}
		*walk.link = item;
		item->rmap_list = old;
		if (same) {
			item->rmap_list = old->rmap_list;
			if (walk.passed < walk.index->nr && walk.index->at[walk.passed].item == old)
				walk.index->at[walk.passed].item = item;
			if (k_ksm_scan->rmap_list == &old->rmap_list)
				k_ksm_scan->rmap_list = &item->rmap_list;
			drop_rmap_item(old);
		} else if (k_ksm_scan->mm_slot == slot && k_ksm_scan->rmap_list == walk.link &&
			   item_address(item) < k_ksm_scan->address) {
			/* What ksmd has passed stays behind its cursor */
			k_ksm_scan->rmap_list = &item->rmap_list;
		}
	}
	if (slot)
		walk_end(&walk);
}

/* Put the new rmap_items into the lists, before the references to their mms are dropped. */
static void merge_finish(struct merge_ctx *ctx)
{
	struct merge_side *keep = &ctx->keep, *take = &ctx->take;

	end_run(ctx, keep);
	end_run(ctx, take);
	if (!memchr_inv(keep->runs, 0, sizeof(keep->runs)) && !memchr_inv(take->runs, 0, sizeof(take->runs)))
		return;
	if (!ctx->locked) {
		mutex_lock(k_ksm_thread_mutex);
		while (*k_ksm_run & KSM_RUN_OFFLINE) {
			mutex_unlock(k_ksm_thread_mutex);
			wait_on_bit(k_ksm_run, ilog2(KSM_RUN_OFFLINE), TASK_UNINTERRUPTIBLE);
			mutex_lock(k_ksm_thread_mutex);
		}
	}
	if (memchr_inv(keep->runs, 0, sizeof(keep->runs)))
		insert_items(keep->mm, keep->runs);
	if (memchr_inv(take->runs, 0, sizeof(take->runs)))
		insert_items(take->mm, take->runs);
	mutex_unlock(k_ksm_thread_mutex);
	ctx->locked = false;
}

/* The range of its notifier is that of the batch */
static void flush_side(struct merge_side *side)
{
	flush_range(side->vma, side->range.start, side->range.end);
}

/*
 * Merge n pairs whose folios are locked. A fault on a clear pte allocates, or reads a file: so ptes are clear while they are flushed, not
 * while pages are compared.
 */
static void merge_pairs(struct merge_ctx *ctx, unsigned int n, u8 *status)
{
	bool zero = ctx->flags & KSM_MERGE_ZERO;
	bool one = ctx->flags & KSM_MERGE_KEEP_ONE;
	struct merge_side *keep = &ctx->keep, *take = &ctx->take;
	bool found = false, ok;
	unsigned int i, k;

	for (i = 0; i < n; i++) {
		k = one ? 0 : i;
		if (status[i] != MERGE_PENDING)
			continue;
		if (!zero && !keep->page[k].cleared && !folio_test_ksm(keep->page[k].folio))
			merge_clear(keep, k);
		merge_clear(take, i);
		found = true;
	}
	if (!found)
		return;
	flush_side(take);
	if (!zero)
		flush_side(keep);
	/* As in folio_try_share_anon_rmap_pte(): then look for pins */
	smp_mb();
	for (i = 0; i < n; i++) {
		k = one ? 0 : i;
		if (status[i] != MERGE_PENDING)
			continue;
		/* Both, so that neither pte stays clear */
		ok = merge_protect(ctx, take, i);
		if (!zero && !folio_test_ksm(keep->page[k].folio))
			ok &= merge_protect(ctx, keep, k);
		if (!ok)
			status[i] = KSM_PAGE_BUSY;
	}

	for (i = 0, found = false; i < n; i++) {
		struct page *page = zero ? NULL : &keep->page[one ? 0 : i].folio->page;

		if (status[i] != MERGE_PENDING)
			continue;
		if (merge_contents_equal(page, &take->page[i].folio->page))
			found = true;
		else
			status[i] = KSM_PAGE_DIFFERS;
	}

	for (i = 0; i < n; i++)
		if (status[i] == MERGE_PENDING)
			merge_clear(take, i);
	if (found)
		flush_side(take);
	for (i = 0; i < n; i++) {
		if (status[i] == MERGE_PENDING)
			status[i] = merge_pair(ctx, one ? 0 : i, i);
		merge_restore(take, i);
	}
	for (i = 0; !zero && i < (one ? 1 : n); i++)
		merge_restore(keep, i);
}

/*
 * Merge pages from the addresses of both sides on. Returns for how many pages
 * it did what can be done, 0 if it is to be called again, or an error. Only
 * pages that are KSM_PAGE_UNTRIED are looked at.
 */
static int merge_batch(struct merge_ctx *ctx, unsigned int n, u8 *status)
{
	bool zero = ctx->flags & KSM_MERGE_ZERO;
	bool one = ctx->flags & KSM_MERGE_KEEP_ONE;
	struct merge_side *take = &ctx->take;
	struct merge_side *keep = zero ? take : &ctx->keep;
	unsigned int i, nr_keep = n;
	bool large = false;
	u8 st;
	int err;

	err = merge_lock_mms(keep->mm, take->mm);
	if (err)
		return err;

	st = merge_find_vma(take, &n);
	if (st == MERGE_PENDING && !zero)
		st = merge_find_vma(keep, one ? &nr_keep : &n);
	if (st == MERGE_PENDING && zero && mm_forbids_zeropage(take->mm))
		st = KSM_PAGE_INELIGIBLE;
	if (st != MERGE_PENDING)
		goto out;

	err = merge_mark(ctx, take);
	if (!err && !zero)
		err = merge_mark(ctx, keep);
	if (err)
		return err < 0 ? err : 0;

	st = merge_find_table(take, &n);
	if (!zero && (st == MERGE_PENDING || st == MERGE_LARGE)) {
		u8 keep_st = merge_find_table(keep, one ? &nr_keep : &n);

		if (keep_st != MERGE_PENDING)
			st = keep_st;
	}
	if (st == MERGE_LARGE)
		goto split;
	if (st != MERGE_PENDING)
		goto out;
	n = min_t(unsigned int, n, MERGE_BATCH);
	nr_keep = zero ? 0 : one ? 1 : n;

	for (i = 0; i < n; i++) {
		take->page[i] = (struct merge_page){};
		keep->page[i] = (struct merge_page){};
	}
	flush_cache_range(take->vma, take->addr, take->addr + n * PAGE_SIZE);
	mmu_notifier_range_init(&take->range, MMU_NOTIFY_CLEAR, 0, take->mm,
				take->addr, take->addr + n * PAGE_SIZE);
	notifier_start(&take->range);
	if (!zero) {
		flush_cache_range(keep->vma, keep->addr,
				  keep->addr + nr_keep * PAGE_SIZE);
		mmu_notifier_range_init(&keep->range, MMU_NOTIFY_CLEAR, 0,
					keep->mm, keep->addr,
					keep->addr + nr_keep * PAGE_SIZE);
		notifier_start(&keep->range);
	}
	if (!merge_lock_tables(keep, take)) {
		n = 0;
		goto out_notify;
	}

	for (i = 0; i < n; i++) {
		if (status[i] != KSM_PAGE_UNTRIED)
			continue;
		status[i] = merge_prepare(ctx, one ? 0 : i, i);
		if (status[i] == MERGE_LARGE) {
			status[i] = KSM_PAGE_UNTRIED;
			large = i == 0;
			n = i;
			break;
		}
	}
	merge_pairs(ctx, n, status);
	merge_unlock_tables(keep, take);
out_notify:
	if (!zero)
		notifier_end(&keep->range);
	notifier_end(&take->range);
	if (large)
		goto split;
	merge_unlock_mms(keep->mm, take->mm);

	/* Old rmap_items may be of folios that are locked: not before all are not */
	nr_keep = min(nr_keep, n);
	merge_release(take, n);
	merge_release(&ctx->keep, nr_keep);
	merge_store_items(ctx, take, n);
	merge_store_items(ctx, &ctx->keep, nr_keep);
	return n;

split:
	n = 1;
	st = merge_split(ctx);
out:
	merge_unlock_mms(keep->mm, take->mm);
	if (st == MERGE_PENDING)
		return 0;
	for (i = 0; i < n; i++)
		if (status[i] == KSM_PAGE_UNTRIED)
			status[i] = st;
	return n;
}

/* Merge up to MERGE_CHUNK pages. ksm_thread_mutex is held afterwards, for the next range. */
static int merge_chunk(struct merge_ctx *ctx, struct ksm_merge_range *range,
		       unsigned int n)
{
	bool one = range->flags & KSM_MERGE_KEEP_ONE;
	unsigned int i, done = 0, retries = 0;
	int ret;

	if (ctx->held >= MERGE_CHUNK)
		merge_unlock(ctx);
	ret = merge_lock(ctx);
	if (ret)
		return ret;
	n = min(n, MERGE_CHUNK - ctx->held);
	memset(ctx->status, KSM_PAGE_UNTRIED, n);

	while (!ret && done < n) {
		u8 *status = ctx->status + done;

		ctx->want_drain = false;
		ctx->keep.addr = range->keep_addr +
				 (one ? 0 : range->nr_done + done) * PAGE_SIZE;
		ctx->take.addr = range->take_addr +
				 (range->nr_done + done) * PAGE_SIZE;
		if (!merge_refill(ctx, min_t(unsigned int, n - done,
					     MERGE_BATCH))) {
			ret = -ENOMEM;
			break;
		}
		ret = merge_batch(ctx, n - done, status);
		if (ret < 0)
			break;
		if (ctx->want_drain && !ctx->drained) {
			/* Some are in a per-CPU batch: try those again */
			ctx->drained = true;
			K(lru_add_drain_all)();
			for (i = 0; i < ret; i++)
				if (status[i] == KSM_PAGE_BUSY)
					status[i] = KSM_PAGE_UNTRIED;
			ret = 0;
		} else if (!ret && ++retries > 8) {
			/* It was never the same twice */
			*status = KSM_PAGE_BUSY;
			ret = 1;
		}
		if (ret)
			retries = 0;
		done += ret;
		ret = 0;
		cond_resched();
	}
	for (i = 0; i < done; i++)
		if (ctx->status[i] == KSM_PAGE_MERGED)
			pages_merged++;
	ctx->held += done;
	return done ?: ret;
}

/* The memory of a process, if the caller may read and change it */
static struct mm_struct *ksm_request_mm(int pidfd)
{
	struct task_struct *task;
	struct mm_struct *mm;
	unsigned int f_flags;

	task = K(pidfd_get_task)(pidfd, &f_flags);
	if (IS_ERR(task))
		return ERR_CAST(task);
	mm = K(mm_access)(task, PTRACE_MODE_ATTACH_FSCREDS);
	put_task_struct(task);
	/* A process without memory is no error on the older ones of these kernels */
	if (!mm)
		return ERR_PTR(-ESRCH);
	if (!IS_ERR(mm) && mm != current->mm && !capable(CAP_SYS_NICE)) {
		mmput(mm);
		return ERR_PTR(-EPERM);
	}
	return mm;
}

/* Often, many ranges in a row are of the same processes */
static int merge_get_mm(struct merge_ctx *ctx, int pidfd, struct merge_side *side)
{
	struct mm_struct *mm;

	if (side->mm && side->pidfd == pidfd)
		return 0;
	merge_unlock(ctx);
	mm = ksm_request_mm(pidfd);
	if (IS_ERR(mm))
		return PTR_ERR(mm);
	merge_finish(ctx);
	if (side->mm)
		mmput(side->mm);
	side->mm = mm;
	side->pidfd = pidfd;
	return 0;
}

static bool ksm_bad_request(u64 addr, u64 nr_pages)
{
	return !nr_pages || !PAGE_ALIGNED(addr) || addr > TASK_SIZE_MAX ||
	       nr_pages > (TASK_SIZE_MAX - addr) >> PAGE_SHIFT;
}

static int merge_check(struct merge_ctx *ctx, struct ksm_merge_range *range)
{
	bool zero = range->flags & KSM_MERGE_ZERO;
	bool one = range->flags & KSM_MERGE_KEEP_ONE;
	int err;

	if (range->flags & ~(KSM_MERGE_KEEP_ONE | KSM_MERGE_ZERO) ||
	    (zero && (one || range->keep_addr || range->keep_mappers || range->keep_pidfd != -1)) ||
	    range->reserved ||
	    ksm_bad_request(range->take_addr, range->nr_pages) ||
	    ksm_bad_request(range->keep_addr, one ? 1 : range->nr_pages))
		return -EINVAL;
	err = merge_get_mm(ctx, range->take_pidfd, &ctx->take);
	if (err || zero)
		return err;
	err = merge_get_mm(ctx, range->keep_pidfd, &ctx->keep);
	if (err)
		return err;
	if (!one && ctx->keep.mm == ctx->take.mm &&
	    max(range->keep_addr, range->take_addr) -
	    min(range->keep_addr, range->take_addr) <
	    range->nr_pages << PAGE_SHIFT)
		return -EINVAL;
	return 0;
}

/* Copies from and to user space that may sleep only without ksm_thread_mutex, which is worth keeping for many small ranges */
static unsigned long merge_get(struct merge_ctx *ctx, void *to, const void __user *from, size_t n)
{
	if (ctx->locked && !copy_from_user_nofault(to, from, n))
		return 0;
	merge_unlock(ctx);
	return copy_from_user(to, from, n);
}

static unsigned long merge_put(struct merge_ctx *ctx, void __user *to, const void *from, size_t n)
{
	if (ctx->locked && !copy_to_user_nofault(to, from, n))
		return 0;
	merge_unlock(ctx);
	return copy_to_user(to, from, n);
}

/* Returns the number of pages tried. Less than there are is not an error. */
static u64 merge_range(struct merge_ctx *ctx, struct ksm_merge_range *range,
		       u64 budget)
{
	u8 __user *user = u64_to_user_ptr(range->page_status);
	int i, n = 0;

	range->nr_done = 0;
	range->nr_merged = 0;
	range->status = merge_check(ctx, range);
	ctx->flags = range->flags;
	ctx->most = range->keep_mappers;

	while (!range->status && range->nr_done < range->nr_pages) {
		n = min3(range->nr_pages - range->nr_done,
			 budget - range->nr_done, (u64)MERGE_CHUNK);
		if (!n || signal_pending(current))
			break;
		n = merge_chunk(ctx, range, n);
		if (n < 0) {
			if (n != -EINTR)
				range->status = n;
			break;
		}
		if (user && merge_put(ctx, user + range->nr_done, ctx->status, n))
			range->status = -EFAULT;
		for (i = 0; i < n; i++)
			range->nr_merged += ctx->status[i] == KSM_PAGE_MERGED;
		range->nr_done += n;
	}
	return range->nr_done;
}

/*
 * ksmd frees the rmap_items of processes that have exited. If it is at rest, this does.
 */
#define REAP_BATCH	1024
#define REAP_DELAY	(HZ / 50)
#define PRUNE_DELAY	(10 * HZ)

static void reap(struct work_struct *work);
static DECLARE_DELAYED_WORK(reap_work, reap);
/*
 * Where the last batch ended (the mm may be gone by now), when this round of batches began, after how long it has to be looked again
 * at what was still exiting, and before when no exit begins another round
 */
static struct mm_struct *reap_at;
static unsigned long reap_from, reap_began, reap_again, reap_next;

static void prune(struct work_struct *work);
static DECLARE_DELAYED_WORK(prune_work, prune);
/* How many nodes are still to be looked at in this round, when it began, and before when no other one begins */
static long prune_left;
static unsigned long prune_began, prune_next;

/* What rounds are begun for, and how many of those each has seen. What comes during a round begins another one. */
static atomic_t exits, calls;
static int reap_seen, prune_seen;

/* The work is done once for all that comes before next */
static void queue_round(struct delayed_work *work, unsigned long next)
{
	queue_delayed_work(system_unbound_wq, work, clamp((long)(next - jiffies), (long)REAP_DELAY, 64L * HZ));
}

static long ksm_ioctl_merge(struct ksm_merge __user *arg)
{
	struct ksm_merge_range __user *user;
	u64 budget = KSM_MERGE_MAX_PAGES;
	struct ksm_merge_range range;
	struct merge_ctx *ctx;
	struct ksm_merge req;
	long i, ret = 0;

	if (copy_from_user(&req, arg, sizeof(req)))
		return -EFAULT;
	if (req.version != KSM_ABI_VERSION || req.range_size != sizeof(range) ||
	    req.reserved)
		return -EINVAL;
	if (req.nr_ranges > KSM_MERGE_MAX_RANGES)
		return -E2BIG;
	ctx = kvzalloc(sizeof(*ctx), GFP_KERNEL);
	if (!ctx)
		return -ENOMEM;

	user = u64_to_user_ptr(req.ranges);
	for (i = 0; i < req.nr_ranges && budget; i++) {
		ret = -EINTR;
		if (signal_pending(current))
			break;
		ret = -EFAULT;
		if (merge_get(ctx, &range, &user[i], sizeof(range)))
			break;
		budget -= merge_range(ctx, &range, budget);
		ret = -EINTR;
		if (!range.status && !range.nr_done)
			break;
		ret = -EFAULT;
		if (merge_put(ctx, &user[i], &range, sizeof(range)))
			break;
		ret = 0;
		if (!range.status && range.nr_done < range.nr_pages) {
			i++;
			break;
		}
		cond_resched();
	}
	merge_finish(ctx);
	merge_unlock(ctx);
	atomic_inc(&calls);
	queue_round(&prune_work, prune_next);
	merge_free_spare(ctx);
	if (ctx->keep.mm)
		mmput(ctx->keep.mm);
	if (ctx->take.mm)
		mmput(ctx->take.mm);
	kvfree(ctx);
	return i ?: ret;
}

/* Hash pages this many at a time, with the page table locked */
#define KSM_HASH_CHUNK	32
#define KSM_HASH_UNGOLDEN 0xf1de83e19937733dULL /* times GOLDEN is 1 */

static u64 ksm_hash_fold(u64 a, u64 b)
{
	return mul_u64_u64_shr(a, b, 64) ^ (a * b);
}

/* Line n of a page: see struct ksm_hash */
static u64 ksm_hash_line(const u64 *page, const u64 *k, unsigned int n)
{
	unsigned int line = (n * (k[8] | 1) + (k[8] >> 32)) % (PAGE_SIZE / 64);
	const u64 *w = page + line * 8;

	return ksm_hash_fold(w[0] ^ k[0], w[1] ^ k[1]) +
	       ksm_hash_fold(w[2] ^ k[2], w[3] ^ k[3]) +
	       ksm_hash_fold(w[4] ^ k[4], w[5] ^ k[5]) +
	       ksm_hash_fold(w[6] ^ k[6], w[7] ^ k[7]);
}

/*
 * Make a hash of h->from lines one of h->to lines, adding or removing some.
 * Returns 0 if the hash or the page is none.
 */
static u64 ksm_hash_page(struct ksm_hash *h, const u64 *k, struct page *page,
			 u64 hash)
{
	struct folio *folio = page ? page_folio(page) : NULL;
	unsigned int n;
	u64 *addr;

	if (!folio || !folio_test_anon(folio) || folio_is_zone_device(folio) ||
	    PageHWPoison(page) || (h->from && !hash))
		return 0;
	addr = kmap_local_page(page);
	if (!h->from)
		hash = h->key;
	for (n = h->from; n < h->to; n++)
		hash = rol64((hash ^ ksm_hash_line(addr, k, n)) *
			     KSM_HASH_GOLDEN, 29);
	for (n = h->from; n > h->to; n--)
		hash = (ror64(hash, 29) * KSM_HASH_UNGOLDEN) ^
		       ksm_hash_line(addr, k, n - 1);
	kunmap_local(addr);
	return hash;
}

static int ksm_hash_chunk(struct mm_struct *mm, struct ksm_hash *h,
			  const u64 *k, u64 *hashes, unsigned int n)
{
	unsigned long addr = h->addr + h->nr_done * PAGE_SIZE;
	struct vm_area_struct *vma = NULL;
	struct folio_walk fw;
	bool locked = false;	/* fw is at the page before, or at this one */

	if (mmap_read_lock_killable(mm))
		return -EINTR;
	for (; n--; hashes++, addr += PAGE_SIZE) {
		if (locked && (fw.level != FW_LEVEL_PTE || !(addr & ~PMD_MASK) ||
			       addr >= vma->vm_end)) {
			folio_walk_done(&fw);
			locked = false;
		}
		if (locked) {
			fw.pte = ptep_get(++fw.ptep);
			fw.page = pte_present(fw.pte) ?
				K(vm_normal_page)(vma, addr, fw.pte) : NULL;
		} else {
			if (!vma || addr >= vma->vm_end)
				vma = find_vma(mm, addr);
			locked = vma && addr >= vma->vm_start &&
				 vma_ksm_compatible(vma) &&
				 K(folio_walk_start)(&fw, vma, addr, 0);
		}
		*hashes = locked ? ksm_hash_page(h, k, fw.page, *hashes) : 0;
	}
	if (locked)
		folio_walk_done(&fw);
	mmap_read_unlock(mm);
	return 0;
}

static long ksm_ioctl_hash(struct ksm_hash __user *arg)
{
	u64 k[9], hashes[KSM_HASH_CHUNK];
	u64 __user *user;
	struct mm_struct *mm;
	struct ksm_hash h;
	int i, n, err = 0;

	if (copy_from_user(&h, arg, sizeof(h)))
		return -EFAULT;
	if (h.version != KSM_ABI_VERSION || h.flags || h.reserved ||
	    max(h.from, h.to) > PAGE_SIZE / 64 ||
	    ksm_bad_request(h.addr, h.nr_pages))
		return -EINVAL;
	for (i = 0; i < ARRAY_SIZE(k); i++) {
		k[i] = h.key + (i + 1) * KSM_HASH_GOLDEN;
		k[i] = (k[i] ^ (k[i] >> 30)) * 0xbf58476d1ce4e5b9ULL;
		k[i] = (k[i] ^ (k[i] >> 27)) * 0x94d049bb133111ebULL;
		k[i] ^= k[i] >> 31;
	}
	mm = ksm_request_mm(h.pidfd);
	if (IS_ERR(mm))
		return PTR_ERR(mm);
	h.nr_pages = min_t(u64, h.nr_pages, KSM_MERGE_MAX_PAGES);
	user = u64_to_user_ptr(h.hashes);
	for (h.nr_done = 0; !err && h.nr_done < h.nr_pages; user += n) {
		n = min_t(u64, h.nr_pages - h.nr_done, KSM_HASH_CHUNK);
		if (h.from && copy_from_user(hashes, user, n * sizeof(u64)))
			err = -EFAULT;
		else if (signal_pending(current))
			err = -EINTR;
		else
			err = ksm_hash_chunk(mm, &h, k, hashes, n);
		if (!err && copy_to_user(user, hashes, n * sizeof(u64)))
			err = -EFAULT;
		h.nr_done += err ? 0 : n;
		cond_resched();
	}
	mmput(mm);
	if (err && (err != -EINTR || !h.nr_done))
		return err;
	return put_user(h.nr_done, &arg->nr_done);
}

static long ksm_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	switch (cmd) {
	case KSM_IOC_MERGE:
		return ksm_ioctl_merge((void __user *)arg);
	case KSM_IOC_HASH:
		return ksm_ioctl_hash((void __user *)arg);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations ksm_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = ksm_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice ksm_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "ksm",
	.mode = 0600,
	.fops = &ksm_fops,
};

/*
 * A process that was forked from one that has exited has no rmap_items of its own: those of the parent are what finds its
 * mappings. The anon_vma of the parent has no mappings but of such processes any more.
 */
static bool item_needed(struct ksm_rmap_item *item)
{
	struct folio *folio;
	bool needed;

	if (!(item->address & STABLE_FLAG) || !READ_ONCE(item->anon_vma->rb_root.rb_root.rb_node))
		return false;
	folio = K(ksm_get_folio)(item->head, KSM_GET_FOLIO_NOLOCK);
	if (!folio)
		return false;
	/* What is swapped out comes back to the same folio as long as that is in swapcache */
	needed = folio_mapped(folio) || folio_test_swapcache(folio);
	folio_put(folio);
	return needed;
}

/*
 * Called and returns with ksm_mmlist_lock held. Returns the next slot, or the same one with reap_from, if the budget is spent. A slot
 * that is done is put on a list: without the lock, ksm_exit() may free the next one.
 */
static struct mm_slot *reap_slot(struct mm_slot *slot, int *budget, struct list_head *done)
{
	struct ksm_mm_slot *mm_slot = container_of(slot, struct ksm_mm_slot, slot);
	struct ksm_rmap_item *item;
	struct list_walk walk;
	struct mm_slot *next;

	/*
	 * As exit_mmap() is over, ksm_exit() is, too: the slot is freed under ksm_thread_mutex only. Having no VMAs doesn't prove that,
	 * since a process can unmap all it has. But __mmput() drops exe_file only after exit_mmap(); and the memory of an exec that
	 * failed, which may have none, has a VMA until then.
	 */
	spin_unlock(k_ksm_mmlist_lock);
	walk_start(&walk, mm_slot);
	item = walk_to(&walk, slot->mm == reap_at ? reap_from : 0);
	/* What we free must not be in the index */
	walk.index->nr = walk.passed;
	for (; (item = *walk.link) && *budget > 0; (*budget)--) {
		if (item_needed(item)) {
			walk_step(&walk);
			continue;
		}
		*walk.link = item->rmap_list;
		if (k_ksm_scan->rmap_list == &item->rmap_list)
			k_ksm_scan->rmap_list = walk.link;
		drop_rmap_item(item);
	}
	walk_end(&walk);
	spin_lock(k_ksm_mmlist_lock);
	reap_from = item ? item_address(item) : 0;
	if (item)
		return slot;
	next = list_next_entry(slot, mm_node);
	if (mm_slot->rmap_list)
		return next;

	if (k_ksm_scan->mm_slot == mm_slot) {
		k_ksm_scan->mm_slot = container_of(next, struct ksm_mm_slot, slot);
		k_ksm_scan->address = 0;
		k_ksm_scan->rmap_list = &k_ksm_scan->mm_slot->rmap_list;
		/* That was the end of a scan: its unstable tree is history */
		if (k_ksm_scan->mm_slot == k_ksm_mm_head)
			k_ksm_scan->seqnr++;
	}
	hash_del(&slot->hash);
	list_move(&slot->mm_node, done);
	return next;
}

static void free_slots(struct list_head *done)
{
	struct mm_slot *slot, *next;

	list_for_each_entry_safe(slot, next, done, mm_node) {
		mm_flags_clear(MMF_VM_MERGE_ANY, slot->mm);
		mm_flags_clear(MMF_VM_MERGEABLE, slot->mm);
		mmdrop(slot->mm);
		kfree(container_of(slot, struct ksm_mm_slot, slot));
	}
}

/*
 * Let go of nodes whose pages are gone: the last rmap_item went before its page did, or a process that lives has unmapped both. The
 * list has no order: it's turned as we go.
 */
static bool prune_some(void)
{
	struct ksm_stable_node *node, *first = NULL;
	struct folio *folio;
	bool progress = false, has_items;
	int budget;

	mutex_lock(k_ksm_thread_mutex);
	if (*k_ksm_run & KSM_RUN_OFFLINE) {
		mutex_unlock(k_ksm_thread_mutex);
		prune_left = 0;
		return false;
	}
	if (!prune_left) {
		/* The nodes that have rmap_items. Or the list is turned once before. */
		prune_left = *k_ksm_pages_shared + 1;
		prune_began = jiffies;
		prune_seen = atomic_read(&exits) + atomic_read(&calls);
	}
	for (budget = REAP_BATCH; budget && prune_left > 0 && !list_empty(k_migrate_nodes); budget--) {
		node = list_first_entry(k_migrate_nodes, struct ksm_stable_node, list);
		if (node == first)
			break;
		list_move_tail(&node->list, k_migrate_nodes);
		has_items = !hlist_empty(&node->hlist);
		prune_left -= has_items;
		/* This may free the node */
		folio = K(ksm_get_folio)(node, KSM_GET_FOLIO_NOLOCK);
		progress |= has_items || !folio;
		if (folio) {
			folio_put(folio);
			first = first ?: node;
		}
		cond_resched();
	}
	/* Many nodes may have pages but no rmap_items, and nothing counts those */
	if (budget || !progress)
		prune_left = 0;
	mutex_unlock(k_ksm_thread_mutex);
	return prune_left;
}

static void prune(struct work_struct *work)
{
	if (prune_some()) {
		queue_delayed_work(system_unbound_wq, &prune_work, 1);
		return;
	}
	prune_next = jiffies + max(PRUNE_DELAY, 64 * (jiffies - prune_began));
	if (prune_seen != atomic_read(&exits) + atomic_read(&calls))
		queue_round(&prune_work, prune_next);
}

/* Looks at up to REAP_BATCH processes and records. Returns after how long to call again, or 0. */
static unsigned long reap_some(void)
{
	struct mm_slot *slot;
	LIST_HEAD(done);
	int budget = REAP_BATCH;

	mutex_lock(k_ksm_thread_mutex);
	if (*k_ksm_run & KSM_RUN_OFFLINE) {
		mutex_unlock(k_ksm_thread_mutex);
		return REAP_DELAY;
	}
	spin_lock(k_ksm_mmlist_lock);
	slot = reap_at ? slot_of(reap_at) : NULL;
	if (!slot) {
		slot = list_first_entry(&k_ksm_mm_head->slot.mm_node, struct mm_slot, mm_node);
		reap_at = NULL;
		reap_from = 0;
		reap_again = 0;
		reap_began = jiffies;
		reap_seen = atomic_read(&exits);
	}
	for (; slot != &k_ksm_mm_head->slot && budget > 0; budget--) {
		struct ksm_mm_slot *mm_slot = container_of(slot, struct ksm_mm_slot, slot);

		if (atomic_read(&slot->mm->mm_users) || !mm_slot->rmap_list) {
			slot = list_next_entry(slot, mm_node);
		} else if (rcu_access_pointer(slot->mm->exe_file) || !mtree_empty(&slot->mm->mm_mt)) {
			/* Before exit_mmap(), nodes would be left without rmap_items, and ksm_exit() may be still to come */
			slot = list_next_entry(slot, mm_node);
			reap_again = REAP_DELAY;
		} else {
			slot = reap_slot(slot, &budget, &done);
			reap_at = NULL;
		}
	}
	reap_at = slot == &k_ksm_mm_head->slot ? NULL : slot->mm;
	spin_unlock(k_ksm_mmlist_lock);
	free_slots(&done);
	mutex_unlock(k_ksm_thread_mutex);
	return reap_at ? 1 : reap_again;
}

static void reap(struct work_struct *work)
{
	unsigned long delay = reap_some();

	if (delay) {
		queue_delayed_work(system_unbound_wq, &reap_work, delay);
		return;
	}
	/* What is kept would be looked at again for each exit */
	reap_next = jiffies + 16 * (jiffies - reap_began);
	if (reap_seen != atomic_read(&exits))
		queue_round(&reap_work, reap_next);
}

static void on_ksm_exit(void *data, void *mm)
{
	atomic_inc(&exits);
	queue_round(&reap_work, reap_next);
	queue_round(&prune_work, prune_next);
}

static void on_ksm_start_scan(void *data, int seq, u32 items)
{
	scans++;
}

static struct {
	const char *name;
	void *probe;
	struct tracepoint *tp;
} tracepoints[] = {
	{ "ksm_exit", on_ksm_exit },
	{ "ksm_start_scan", on_ksm_start_scan },
};

static void find_tracepoint(struct tracepoint *tp, void *data)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(tracepoints); i++)
		if (!strcmp(tp->name, tracepoints[i].name))
			tracepoints[i].tp = tp;
}

/*
 * The kernel's release is VERSION+DISTRIBUTION-amd64, or -cloud-amd64, and those are built from one source, whose version is VERSION-1,
 * or of deb13, for example, VERSION-1~bpo13+1 or VERSION-1~deb13u1. Later builds of a VERSION, perhaps +deb13.1, have other patches.
 */
static bool is_reviewed(void)
{
	static const struct {
		const char *distribution;
		unsigned int series, first, last;
	} list[] = { REVIEWED };
	const struct new_utsname *uts = init_utsname();
	const char *version = strstr(uts->version, " Debian "), *suffix;
	char distribution[8] = "", package[40], first_build[40], backport[16], rebuild[16];
	unsigned int major, minor, patch, i;
	int end = 0;

	if (sscanf(uts->release, "%u.%u.%u+%7[deb0123456789]%n", &major, &minor, &patch, distribution, &end) != 4 ||
	    !version || sscanf(version, " Debian %39s", package) != 1)
		return false;
	if (strcmp(uts->release + end, "-amd64") && strcmp(uts->release + end, "-cloud-amd64"))
		return false;
	snprintf(first_build, sizeof(first_build), "%u.%u.%u-1", major, minor, patch);
	if (strncmp(package, first_build, strlen(first_build)))
		return false;
	suffix = package + strlen(first_build);
	snprintf(backport, sizeof(backport), "~bpo%s+1", distribution + 3);
	snprintf(rebuild, sizeof(rebuild), "~%su1", distribution);
	if (*suffix && strcmp(suffix, backport) && strcmp(suffix, rebuild))
		return false;
	for (i = 0; i < ARRAY_SIZE(list); i++)
		if (!strcmp(distribution, list[i].distribution) && list[i].series == major * 100 + minor &&
		    patch >= list[i].first && patch <= list[i].last)
			return true;
	return false;
}

struct symbol {
	unsigned int nr;
	unsigned long addr[4];
};

static int note_symbol(void *data, unsigned long addr)
{
	struct symbol *symbol = data;

	if (symbol->nr < ARRAY_SIZE(symbol->addr))
		symbol->addr[symbol->nr] = addr;
	symbol->nr++;
	return 0;
}

unsigned long lookup_name(const char *name);
DEFINE_STATIC_CALL_NULL(k_lookup, lookup_name);
int each_symbol(int (*fn)(void *data, unsigned long addr), const char *name, void *data);
DEFINE_STATIC_CALL_NULL(k_each_symbol, each_symbol);
static struct symbol slots_hashes;

/* The only symbol of that name, or 0 */
static unsigned long find_symbol(const char *name)
{
	struct symbol symbol = {};

	K(each_symbol)(note_symbol, name, &symbol);
	return symbol.nr == 1 ? symbol.addr[0] : 0;
}

static const char *resolve(void)
{
	struct kprobe kp = { .symbol_name = "kallsyms_lookup_name" };
	unsigned long addr;
	int i;

	if (register_kprobe(&kp))
		return kp.symbol_name;
	/* Perhaps behind an ENDBR, which direct calls do not need */
	addr = (unsigned long)kp.addr;
	unregister_kprobe(&kp);
	static_call_update(k_lookup, (void *)addr);
	addr = K(lookup)("kallsyms_on_each_match_symbol");
	if (!addr)
		return "kallsyms_on_each_match_symbol";
	static_call_update(k_each_symbol, (void *)addr);

#define RESOLVE_FUNCTION(name)					\
	addr = find_symbol(#name);				\
	if (!addr)						\
		return #name;					\
	static_call_update(k_##name, (void *)addr);
#define RESOLVE_VARIABLE(type, name)				\
	k_##name = (void *)find_symbol(#name);			\
	if (!k_##name)						\
		return #name;
	FUNCTIONS(RESOLVE_FUNCTION)
	VARIABLES(RESOLVE_VARIABLE)
	K(each_symbol)(note_symbol, "mm_slots_hash", &slots_hashes);
	for_each_kernel_tracepoint(find_tracepoint, NULL);
	for (i = 0; i < ARRAY_SIZE(tracepoints); i++)
		if (!tracepoints[i].tp)
			return tracepoints[i].name;
	return NULL;
}

/* Which of the tables of this name has the slot of an mm is KSM's. */
static bool find_slots_hash(struct mm_struct *mm)
{
	struct mm_slot *slot;
	bool found = false;
	int i;

	for (i = 0; !found && i < min_t(int, slots_hashes.nr, ARRAY_SIZE(slots_hashes.addr)); i++) {
		struct ksm_mm_slot *mine;

		slots_hash = (void *)slots_hashes.addr[i];
		mine = find_slot(mm);
		spin_lock(k_ksm_mmlist_lock);
		list_for_each_entry(slot, &k_ksm_mm_head->slot.mm_node, mm_node)
			found |= mine && slot == &mine->slot;
		spin_unlock(k_ksm_mmlist_lock);
	}
	if (!found)
		slots_hash = NULL;
	return found;
}

/* Drop the records of a range. Returns how many there were. */
static int drop_range(struct mm_struct *mm, unsigned long addr, unsigned long end)
{
	struct ksm_rmap_item **link, *item;
	struct ksm_mm_slot *slot;
	int n = 0;

	mutex_lock(k_ksm_thread_mutex);
	slot = find_slot(mm);
	for (link = &slot->rmap_list; slot && (item = *link);) {
		if (item_address(item) < addr || item_address(item) >= end) {
			link = &item->rmap_list;
			continue;
		}
		*link = item->rmap_list;
		if (k_ksm_scan->rmap_list == &item->rmap_list)
			k_ksm_scan->rmap_list = link;
		drop_rmap_item(item);
		n++;
	}
	memset(indexes, 0, sizeof(indexes));
	mutex_unlock(k_ksm_thread_mutex);
	return n;
}

/* What nobody else can be the reason of */
static const char wrong_content[] = "content";

/* Merge two pages of the process that loads us, read and write them. Returns what is not as it should be. */
static const char *test_pages(struct merge_ctx *ctx, unsigned long addr)
{
	struct mm_struct *mm = current->mm;
	struct ksm_merge_range range = { .keep_addr = addr, .take_addr = addr + PAGE_SIZE, .nr_pages = 1 };
	unsigned long __user *keep = (void __user *)addr, *take = (void __user *)(addr + PAGE_SIZE);
	unsigned long a, b, merging = mm->ksm_merging_pages, items = mm->ksm_rmap_items;
	int i, err = 0;

	if (mmap_write_lock_killable(mm))
		return "no lock";
	if (!mm_flags_test(MMF_VM_MERGEABLE, mm))
		err = K(__ksm_enter)(mm);
	mmap_write_unlock(mm);
	if (err || !find_slots_hash(mm))
		return "no slot";
	if (put_user(addr, keep) || put_user(addr, take))
		return "no pages";
	/* Reclaim or compaction may hold one */
	for (i = 0; i < 10 && !range.nr_merged; i++) {
		merge_range(ctx, &range, 1);
		merge_finish(ctx);
		merge_unlock(ctx);
		if (!range.nr_merged)
			msleep(20);
	}
	if (range.status)
		return "run is 2";
	if (range.nr_merged != 1)
		return "not merged";
	if (mm->ksm_merging_pages != merging + 2 || mm->ksm_rmap_items != items + 2)
		return "records";
	if (get_user(a, keep) || get_user(b, take) || a != addr || b != addr)
		return wrong_content;
	if (put_user(~addr, take) || get_user(a, keep) || get_user(b, take) || a != addr || b != ~addr)
		return wrong_content;
	return NULL;
}

/* The same with new pages, of which nothing is left afterwards */
static const char *test_new_pages(struct merge_ctx *ctx)
{
	struct mm_struct *mm = current->mm;
	unsigned long merging = mm->ksm_merging_pages, items = mm->ksm_rmap_items;
	unsigned long addr = vm_mmap(NULL, 0, 2 * PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, 0);
	const char *wrong;
	int dropped = 0;

	if (IS_ERR_VALUE(addr))
		return "no memory";
	wrong = test_pages(ctx, addr);
	if (vm_munmap(addr, 2 * PAGE_SIZE))
		wrong = wrong ?: "unmapping";
	if (slots_hash)
		dropped = drop_range(mm, addr, addr + 2 * PAGE_SIZE);
	if (dropped != 2 || mm->ksm_merging_pages != merging || mm->ksm_rmap_items != items)
		wrong = wrong ?: "records at the end";
	return wrong;
}

static const char *self_test(void)
{
	struct merge_ctx *ctx = kvzalloc(sizeof(*ctx), GFP_KERNEL);
	const char *wrong = "no memory";
	int i;

	if (ctx && current->mm) {
		/* These are what the pidfds of its range, which are 0, stand for */
		ctx->keep.mm = current->mm;
		ctx->take.mm = current->mm;
		/* ksmd may meddle with the first pages, though not with what is in them */
		for (i = 0; wrong && wrong != wrong_content && i < 2; i++)
			wrong = test_new_pages(ctx);
		merge_free_spare(ctx);
	}
	kvfree(ctx);
	pages_merged = 0;
	return wrong;
}

/* The first n of them */
static void remove_tracepoints(int n)
{
	int i;

	for (i = 0; i < n; i++)
		tracepoint_probe_unregister(tracepoints[i].tp, tracepoints[i].probe, NULL);
	tracepoint_synchronize_unregister();
	cancel_delayed_work_sync(&reap_work);
	cancel_delayed_work_sync(&prune_work);
}

static int request_init(void)
{
	const char *missing;
	int i, err = 0;

	if (!is_reviewed()) {
		pr_warn("refused: Linux %s, %s is not on the list of reviewed kernels\n", init_utsname()->release,
			init_utsname()->version);
		return -ENODEV;
	}
	missing = resolve();
	if (missing) {
		pr_warn("refused: Linux %s has no %s, or several\n", init_utsname()->release, missing);
		return -ENODEV;
	}
	missing = self_test();
	if (missing) {
		pr_warn("refused: Linux %s: the test of merging two pages failed: %s\n", init_utsname()->release, missing);
		return -ENODEV;
	}
	for (i = 0; i < ARRAY_SIZE(tracepoints) && !err; i += !err)
		err = tracepoint_probe_register(tracepoints[i].tp, tracepoints[i].probe, NULL);
	if (!err)
		err = misc_register(&ksm_device);
	if (err) {
		remove_tracepoints(i);
		return err;
	}
	/* Of processes that exited before */
	queue_delayed_work(system_unbound_wq, &reap_work, 0);
	return 0;
}

static void request_exit(void)
{
	unsigned long batches = 1024 + *k_ksm_pages_shared / (REAP_BATCH / 2);

	misc_deregister(&ksm_device);
	remove_tracepoints(ARRAY_SIZE(tracepoints));
	/* What is merged stays so, in the care of KSM */
	while (reap_some() == 1)
		cond_resched();
	/* If few nodes have rmap_items, a round may take very many batches. What is left is for ksmd. */
	for (; batches && prune_some(); batches--)
		cond_resched();
}

module_init(request_init);
module_exit(request_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("/dev/ksm: merging of pages that the caller names (experimental)");
