// SPDX-License-Identifier: GPL-2.0
/*
 * Merges, writes, forks, exits, moves, swaps, splits and pins at once, and checks every byte.
 *
 * usage: stress SECONDS [PROCESSES [SEED]], as root, with /dev/ksm, and swap on /dev/ram0. Each process has a window of pages whose
 * contents it knows, and does random things to it. Two mergers name random pairs of pages of random processes, right and wrong
 * ones, by KSM_IOC_MERGE, and hash others. Another process turns KSM's knobs. A process that finds a byte that it did not write
 * prints it and aborts, and the stress fails. With MAKE_IT_FAIL in the environment, allocations for the mergers and for KSM's
 * knobs fail, as /sys/kernel/debug/failslab and fail_page_alloc say.
 *
 * If the kernel has movable memory (movablecore=), blocks of it are taken offline, which moves all that's in them, and back.
 *
 * Two more test what chance seldom meets, with a merger of their own. The holder has a reference to its one page, and fails if that is
 * merged meanwhile. The duellist writes to one of two pages, which are merged all the time, and moved by a sibling. The stress also
 * fails if too little happened.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <linux/io_uring.h>
#include <linux/ksm.h>

#define PAGE	4096UL
#define PAGES	1024UL /* of a window: 4 MiB, aligned to huge pages */
#define WINDOW	(PAGES * PAGE)
#define BASE	((char *)0x200000000000UL)
#define OTHER	((char *)0x210000000000UL)
#define MOST	64
#define FIXED	4UL /* contents of pages that are held */
#define DUEL	((char *)0x220000000000UL) /* of the duellist: two pages, and one of each of these contents */

static struct shared {
	volatile int pids[MOST];
	char *volatile at[MOST]; /* where the window is */
	volatile int stop, failed;
	volatile unsigned long outcomes[KSM_PAGE_FOREIGN + 1], writes, forks, checked;
	/* The page that is held, if at is not NULL */
	struct {
		volatile int pid, seed;
		char *volatile at;
		volatile unsigned long named, rounds;
	} held;
	volatile int duellist;
	volatile unsigned long duels;
	volatile unsigned long movable, unplugged; /* blocks of memory that were tried, and went offline */
} *shared;
static uint8_t content[PAGES]; /* of this process: which of 256 contents each page has */
static int disk; /* its first page is the header of the swap space, which never changes */
static char header[PAGE] __attribute__((aligned(4096)));
static int processes;
static uint64_t rng;

static uint32_t rnd(uint32_t below)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return (rng >> 20) % below;
}

static uint64_t word(int seed, int i)
{
	/* 0 is the page of zeros; neighbours differ in the last word only. */
	if (!seed)
		return 0;
	return i == 511 ? seed : (seed >> 2) * 0x9e3779b97f4a7c15ULL + i;
}

static void fill(char *p, int seed)
{
	uint64_t *w = (uint64_t *)p;

	for (int i = 0; i < 512; i++)
		w[i] = word(seed, i);
}

__attribute__((format(printf, 1, 2))) static void corrupt(const char *format, ...)
{
	va_list list;

	va_start(list, format);
	printf("CORRUPT: process %d: ", getpid());
	vprintf(format, list);
	printf("\n");
	va_end(list);
	fflush(stdout);
	shared->failed = 1;
	shared->stop = 1;
	abort();
}

static void check_page(const char *p, int seed, size_t i, const char *when)
{
	const volatile uint64_t *w = (const volatile uint64_t *)p;

	for (int k = 0; k < 512; k++) {
		uint64_t got = w[k];

		if (got != word(seed, k))
			corrupt("page %zu, word %d: %llx instead of %llx, after %s", i, k, (unsigned long long)got,
				(unsigned long long)word(seed, k), when);
	}
}

static void check(char *base, size_t i, const char *when)
{
	check_page(base + i * PAGE, content[i], i, when);
	__sync_fetch_and_add(&shared->checked, 1);
}

/* The disk writes to pages that are pinned meanwhile, by GUP-fast */
static void read_disk(char *base, size_t i, size_t n)
{
	for (size_t k = i; k < i + n; k++) {
		char *p = base + k * PAGE;

		if (pread(disk, p, PAGE, 0) != (ssize_t)PAGE)
			return;
		if (memcmp(p, header, PAGE))
			corrupt("page %zu, read from disk", k);
		fill(p, content[k]);
	}
}

static char *window(char *at)
{
	char *p = mmap(at, WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	if (p == MAP_FAILED)
		exit(4);
	if (rnd(2))
		madvise(p, WINDOW, MADV_HUGEPAGE);
	memset(content, 0, sizeof(content));
	return p;
}

static void work(int slot)
{
	char *base = BASE;
	const char *last = "start";

	for (size_t k = 0; k < PAGES; k++) {
		content[k] = rnd(4);
		fill(base + k * PAGE, content[k]);
	}
	while (!shared->stop) {
		size_t i = rnd(PAGES), n = 1 + rnd(64);

		if (n > PAGES - i)
			n = PAGES - i;
		shared->at[slot] = base;
		switch (rnd(17)) {
		default:
			last = "write";
			for (size_t k = i; k < i + n; k++) {
				content[k] = rnd(8) ? rnd(4) : rnd(256);
				fill(base + k * PAGE, content[k]);
			}
			__sync_fetch_and_add(&shared->writes, n);
			break;
		case 5: case 6:
			for (size_t k = i; k < i + n; k++)
				check(base, k, last);
			break;
		case 7:
			last = "one word";
			/* The last one makes another content of the same four */
			for (size_t k = i; k < i + n; k++) {
				content[k] = content[k] & ~3 ? (content[k] & ~3) + rnd(4) : content[k] ? 1 + rnd(3) : 0;
				((volatile uint64_t *)(base + k * PAGE))[511] = content[k];
			}
			break;
		case 8:
			last = "drop";
			if (rnd(4))
				break;
			/* Not of locked memory; page by page, as of a range that is locked in part, a part would go */
			for (size_t k = i; k < i + n; k++)
				if (!madvise(base + k * PAGE, PAGE, MADV_DONTNEED))
					content[k] = 0;
			break;
		case 9:
			last = rnd(2) ? "pageout" : "cold";
			madvise(base + i * PAGE, n * PAGE, rnd(2) ? MADV_PAGEOUT : MADV_COLD);
			break;
		case 10: {
			char *to = base == BASE ? OTHER : BASE;

			last = "move";
			if (rnd(4))
				break;
			if (mremap(base, WINDOW, WINDOW, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to)
				base = to;
			break;
		}
		case 11: {
			void *pages[64];
			int nodes[64], status[64];

			last = "migrate";
			for (size_t k = 0; k < n; k++) {
				pages[k] = base + (i + k) * PAGE;
				nodes[k] = rnd(2);
			}
			syscall(SYS_move_pages, 0, n, pages, nodes, status, rnd(2) ? 4 : 2);
			break;
		}
		case 12: {
			struct iovec iov = { base + i * PAGE, PAGE };
			static char copy[PAGE] __attribute__((aligned(4096)));
			int p[2];

			/* A reference through which the kernel reads later. That is what the page was, whoever has it by then. */
			last = "splice";
			if (pipe(p))
				break;
			if (vmsplice(p[1], &iov, 1, 0) == (ssize_t)PAGE) {
				usleep(rnd(300));
				if (read(p[0], copy, PAGE) == (ssize_t)PAGE)
					check_page(copy, content[i], i, last);
			}
			close(p[0]);
			close(p[1]);
			break;
		}
		case 13:
			last = "advice";
			switch (rnd(6)) {
			case 0: madvise(base, WINDOW, MADV_UNMERGEABLE); break;
			case 1: madvise(base + i * PAGE, n * PAGE, MADV_MERGEABLE); break;
			case 2: madvise(base, WINDOW, 25 /* MADV_COLLAPSE */); break;
			case 3: mlock(base + i * PAGE, n * PAGE); break;
			case 4: munlock(base, WINDOW); break;
			case 5:
				mprotect(base + i * PAGE, n * PAGE, PROT_READ);
				mprotect(base, WINDOW, PROT_READ | PROT_WRITE);
				break;
			}
			break;
		case 14:
			last = "unmap";
			if (rnd(8))
				break;
			for (size_t k = 0; k < PAGES; k++)
				check(base, k, "unmap");
			munmap(base, WINDOW);
			base = window(BASE);
			break;
		case 15:
			last = "read from disk";
			read_disk(base, i, n);
			break;
		case 16: {
			pid_t pid;

			if (rnd(3))
				break;
			last = "fork";
			__sync_fetch_and_add(&shared->forks, 1);
			pid = fork();
			if (!pid) {
				int from = slot;

				rng ^= getpid() * 0x9e3779b97f4a7c15ULL;
				/* Named in its parent's place now and then */
				if (rnd(2))
					shared->pids[from] = getpid();
				for (int k = rnd(60); k && !shared->stop; k--) {
					size_t at = rnd(PAGES);

					check(base, at, "fork");
					content[at] = rnd(12);
					fill(base + at * PAGE, content[at]);
				}
				for (size_t k = 0; k < PAGES; k++)
					check(base, k, "fork, at the end");
				_exit(0);
			}
			if (pid > 0 && rnd(2))
				waitpid(pid, NULL, 0);
			if (rnd(12) == 0) {
				/* This one ends; the main loop starts another */
				for (size_t k = 0; k < PAGES; k++)
					check(base, k, last);
				_exit(0);
			}
			shared->pids[slot] = getpid();
			break;
		}
		}
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
	for (size_t k = 0; k < PAGES; k++)
		check(base, k, last);
	_exit(0);
}

/* Returns whether it was written */
static int write_file(const char *path, const char *what)
{
	int fd = open(path, O_WRONLY), done;

	if (fd < 0)
		return 0;
	done = write(fd, what, strlen(what)) > 0;
	if (!done && errno != EBUSY && errno != EINVAL && errno != EIO && errno != EAGAIN && errno != ENOMEM && errno != EINTR)
		perror(path);
	close(fd);
	return done;
}

/* Nothing can be known of the hashes, as pages change meanwhile */
static void hash(int dev, int pidfd)
{
	static uint64_t hashes[64];
	struct ksm_hash h = {
		.version = KSM_ABI_VERSION, .pidfd = pidfd, .to = rnd(KSM_HASH_LINES + 1), .key = rnd(3), .nr_pages = 64,
		.addr = (uintptr_t)BASE + rnd(PAGES) * PAGE, .hashes = (uintptr_t)hashes,
	};

	if (ioctl(dev, KSM_IOC_HASH, &h) && errno != ESRCH && errno != EBADF && errno != EINTR)
		perror("KSM_IOC_HASH");
}

static int device(void)
{
	int dev = open("/dev/ksm", O_RDWR);

	if (dev < 0) {
		perror("/dev/ksm");
		shared->failed = shared->stop = 1;
		_exit(1);
	}
	return dev;
}

/* Where a page is, if it's present and exclusive */
static uint64_t entry(int pagemap, const void *at)
{
	uint64_t e = 0;

	if (pread(pagemap, &e, 8, (uintptr_t)at / PAGE * 8) != 8)
		return 0;
	return e & (1ULL << 63 | 1ULL << 56 | ((1ULL << 55) - 1));
}

/* A reference to a page, by get_user_pages() or pin_user_pages(). Returns what to close. */
static int hold(char *at, int pin, int pipes[2])
{
	struct io_uring_params params = {};
	struct iovec iov = { at, PAGE };
	int ring;

	if (!pin)
		return vmsplice(pipes[1], &iov, 1, 0) == (ssize_t)PAGE ? 0 : -1;
	ring = syscall(SYS_io_uring_setup, 1, &params);
	if (ring >= 0 && syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &iov, 1)) {
		close(ring);
		ring = -1;
	}
	return ring;
}

/* What is referred to must keep its frame, as others may write to that. The page is locked, so nothing else takes it away. */
static void holder(void)
{
	int pagemap = open("/proc/self/pagemap", O_RDONLY);

	while (!shared->stop) {
		int seed = rnd(FIXED), pin = rnd(2), pipes[2], ring;
		char *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		uint64_t before;

		if (pipe(pipes) || p == MAP_FAILED || mlock(p, PAGE))
			exit(4);
		fill(p, seed);
		ring = hold(p, pin, pipes);
		before = entry(pagemap, p);
		if (ring >= 0 && before >> 56 == 0x81) {
			unsigned long named = shared->held.named;

			/* Until a call that has begun since is over */
			shared->held.seed = seed;
			shared->held.at = p;
			for (int i = 0; i < 1000 && shared->held.named < named + 2; i++)
				usleep(500);
			shared->held.at = NULL;
			/* It may be migrating in vain just now */
			for (int i = 0; i < 1000 && entry(pagemap, p) != before; i++)
				usleep(100);
			if (entry(pagemap, p) != before)
				corrupt("a page that was %s has been merged", pin ? "pinned" : "held");
			check_page(p, seed, 0, "holding it");
			shared->held.rounds++;
		}
		if (pin && ring >= 0)
			close(ring);
		close(pipes[0]);
		close(pipes[1]);
		munmap(p, PAGE);
	}
	_exit(0);
}

/* Contents 4 to 7 differ in the last word. What was written last must be there. */
static void duellist(void)
{
	char *p = mmap(DUEL, (2 + FIXED) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	volatile uint64_t *last = (volatile uint64_t *)p + 511;

	/* On a processor most of the time, when its pages are merged */
	nice(-20);
	if (p == MAP_FAILED)
		exit(4);
	madvise(p, (2 + FIXED) * PAGE, MADV_NOHUGEPAGE);
	for (int i = 0; i < (int)FIXED; i++)
		fill(p + (2 + i) * PAGE, i);
	fill(p + PAGE, 5);
	fill(p, 5);
	while (!shared->stop) {
		int seed = 4 + rnd(4);

		*last = seed;
		for (int i = rnd(2000); i; i--) {
			uint64_t got = *last;

			if (got != (uint64_t)seed)
				corrupt("%llx instead of %x, which was written last", (unsigned long long)got, seed);
		}
		if (!rnd(64)) {
			check_page(p, seed, 0, "duel");
			check_page(p + PAGE, 5, 1, "duel");
		}
	}
	_exit(0);
}

/* Name the duellist's pages, and the page that is held with one that is equal, each way */
static void duel(void)
{
	int dev = device(), fd = syscall(SYS_pidfd_open, shared->duellist, 0), holder = syscall(SYS_pidfd_open, shared->held.pid, 0);

	nice(-20);
	while (!shared->stop) {
		struct ksm_merge_range range[16] = {};
		uint8_t status[16] = {};
		struct ksm_merge m = { .version = KSM_ABI_VERSION, .range_size = sizeof(*range),
				       .ranges = (uintptr_t)range, .nr_ranges = 1 + rnd(16) };
		char *held = shared->held.at;
		int seed = shared->held.seed;

		for (unsigned int k = 0; k < m.nr_ranges; k++) {
			char *a = DUEL, *b = DUEL + PAGE;
			int way = rnd(2), other = fd;

			if (held && !k) {
				a = held;
				b = DUEL + (2 + seed) * PAGE;
				other = holder;
			}
			range[k] = (struct ksm_merge_range){
				.keep_pidfd = way ? fd : other, .take_pidfd = way ? other : fd, .nr_pages = 1,
				.keep_addr = (uintptr_t)(way ? b : a), .take_addr = (uintptr_t)(way ? a : b),
				.page_status = (uintptr_t)&status[k],
			};
		}
		if (ioctl(dev, KSM_IOC_MERGE, &m) < 0)
			continue;
		for (unsigned int k = !!held; k < m.nr_ranges; k++)
			shared->duels += range[k].nr_merged;
		for (unsigned int k = 0; k < m.nr_ranges; k++)
			if (status[k] == KSM_PAGE_BUSY)
				__sync_fetch_and_add(&shared->outcomes[KSM_PAGE_BUSY], 1);
		shared->held.named += !!held;
	}
	_exit(0);
}

static void move_duellist(void)
{
	while (!shared->stop) {
		void *pages[] = { DUEL, DUEL + PAGE };
		int nodes[] = { rnd(2), rnd(2) }, status[2];

		syscall(SYS_move_pages, shared->duellist, 2, pages, nodes, status, 4 /* MPOL_MF_MOVE_ALL */);
		usleep(rnd(1000));
	}
	_exit(0);
}

static void merge(void)
{
	static struct ksm_merge_range range[64];
	static uint8_t status[64][64];
	int dev = device(), fds[MOST], fresh = 0;

	memset(fds, -1, sizeof(fds));
	if (getenv("MAKE_IT_FAIL"))
		write_file("/proc/self/make-it-fail", "1");
	while (!shared->stop) {
		int n = 1 + rnd(64);
		struct ksm_merge m = { .version = KSM_ABI_VERSION, .range_size = sizeof(*range),
				       .ranges = (uintptr_t)range, .nr_ranges = n };

		if (!fresh--) {
			for (int k = 0; k < processes; k++) {
				if (fds[k] >= 0)
					close(fds[k]);
				fds[k] = syscall(SYS_pidfd_open, shared->pids[k], 0);
			}
			fresh = 20;
		}
		hash(dev, fds[rnd(processes)]);
		for (int k = 0; k < n; k++) {
			size_t length = 1 + rnd(rnd(2) ? 64 : 4), from = rnd(PAGES - length), to = rnd(PAGES - length);
			int a = rnd(processes), b = rnd(processes), kind = rnd(5);
			/* Seldom a wrong place */
			char *keep = rnd(8) ? shared->at[a] : BASE, *take = rnd(8) ? shared->at[b] : OTHER;

			if (rnd(2))
				to = from;
			range[k] = (struct ksm_merge_range){
				.keep_pidfd = fds[a], .take_pidfd = fds[b],
				.keep_addr = (uintptr_t)keep + from * PAGE, .take_addr = (uintptr_t)take + to * PAGE,
				.nr_pages = length, .page_status = (uintptr_t)status[k], .keep_mappers = rnd(3),
				.flags = kind == 1 ? KSM_MERGE_KEEP_ONE : 0,
			};
			if (!kind) {
				range[k].flags = KSM_MERGE_ZERO;
				range[k].keep_pidfd = -1;
				range[k].keep_addr = 0;
				range[k].keep_mappers = 0;
			}
		}
		if (ioctl(dev, KSM_IOC_MERGE, &m) < 0 && errno != EINTR && errno != ENOMEM)
			perror("KSM_IOC_MERGE");
		for (int k = 0; k < n; k++) {
			for (size_t i = 0; i < range[k].nr_done; i++)
				__sync_fetch_and_add(&shared->outcomes[status[k][i]], 1);
		}
	}
	_exit(0);
}

static void turn(void)
{
	static const char *const run[] = { "0", "1", "1", "2", "0", "0" };

	if (getenv("MAKE_IT_FAIL"))
		write_file("/proc/self/make-it-fail", "1");
	while (!shared->stop) {
		usleep(50000 + rnd(500000));
		switch (rnd(6)) {
		default:
			write_file("/sys/kernel/mm/ksm/run", run[rnd(6)]);
			usleep(rnd(100000));
			write_file("/sys/kernel/mm/ksm/run", "0");
			break;
		case 3:
			write_file("/proc/sys/vm/compact_memory", "1");
			break;
		case 4:
			write_file("/sys/kernel/mm/ksm/use_zero_pages", rnd(2) ? "0" : "1");
			break;
		case 5:
			write_file("/sys/fs/cgroup/stress/memory.reclaim", "4M");
			break;
		}
		write_file("/sys/kernel/mm/ksm/pages_to_scan", rnd(2) ? "100" : "20000");
	}
	write_file("/sys/kernel/mm/ksm/run", "0");
	_exit(0);
}

static void on_alarm(int signal)
{
	(void)signal;
}

static int is_movable(int block)
{
	char path[64], zone[16] = "";
	FILE *file;

	snprintf(path, sizeof(path), "/sys/devices/system/memory/memory%d/valid_zones", block);
	file = fopen(path, "r");
	if (!file)
		return 0;
	if (!fgets(zone, sizeof(zone), file))
		*zone = 0;
	fclose(file);
	return !strncmp(zone, "Movable", 7);
}

static void unplug(void)
{
	/* No SA_RESTART: a signal ends the attempt to move what can't be moved */
	struct sigaction action = { .sa_handler = on_alarm };
	char path[64];

	sigaction(SIGALRM, &action, NULL);
	while (!shared->stop) {
		int block = rnd(64);

		if (!is_movable(block)) {
			usleep(10000);
			continue;
		}
		shared->movable++;
		snprintf(path, sizeof(path), "/sys/devices/system/memory/memory%d/state", block);
		alarm(10);
		if (write_file(path, "offline")) {
			shared->unplugged++;
			while (!write_file(path, "online_movable"))
				usleep(10000);
		}
		usleep(rnd(1000000));
	}
	_exit(0);
}

static long read_file(const char *path)
{
	char buf[32] = "";
	int fd = open(path, O_RDONLY);

	if (fd < 0 || read(fd, buf, sizeof(buf) - 1) < 0)
		return -1;
	close(fd);
	return atol(buf);
}

/* Otherwise a kernel that merges nothing, or too seldom, would pass */
static void check_that_enough_happened(int seconds)
{
	const volatile unsigned long *outcomes = shared->outcomes;
	unsigned long least = seconds / 8;

	if (outcomes[KSM_PAGE_MERGED] >= least && shared->duels >= least && shared->held.rounds >= least &&
	    shared->held.named >= least && outcomes[KSM_PAGE_DIFFERS] && outcomes[KSM_PAGE_BUSY] && outcomes[KSM_PAGE_SHARED] &&
	    (shared->unplugged || !shared->movable))
		return;
	printf("too little happened\n");
	shared->failed = 1;
}

/* All processes are gone, and ksmd rests: nothing is shared any more, once what is done after an exit is done. */
static void check_that_nothing_is_left(void)
{
	static const char *const counters[] = { "/sys/kernel/mm/ksm/pages_sharing", "/sys/kernel/mm/ksm/pages_shared" };

	for (int k = 0; k < 2; k++) {
		for (int i = 0; i < 2000 && read_file(counters[k]); i++)
			usleep(10000);
		if (read_file(counters[k])) {
			printf("%s is %ld at the end\n", counters[k], read_file(counters[k]));
			shared->failed = 1;
		}
	}
}

/* Those come first whom others name */
static void (*const others[])(void) = { holder, duellist, move_duellist, duel, merge, merge, turn, unplug };
#define OTHERS	((int)(sizeof(others) / sizeof(*others)))

int main(int argc, char **argv)
{
	int seconds = argc > 1 ? atoi(argv[1]) : 30, status;
	uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
	time_t end = time(NULL) + seconds;

	processes = argc > 2 ? atoi(argv[2]) : 6;
	if (processes > MOST)
		processes = MOST;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	disk = open("/dev/ram0", O_RDONLY | O_DIRECT);
	if (disk < 0 || pread(disk, header, PAGE, 0) != (ssize_t)PAGE) {
		perror("/dev/ram0");
		return 1;
	}
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	for (int k = -OTHERS; k < processes; k++) {
		pid_t pid = fork();

		rng = (seed << 32) + k * 7919 + 12345;
		if (!pid) {
			if (k < 0)
				others[OTHERS + k]();
			window(BASE);
			work(k);
		}
		if (k >= 0)
			shared->pids[k] = pid;
		else if (others[OTHERS + k] == holder)
			shared->held.pid = pid;
		else if (others[OTHERS + k] == duellist)
			shared->duellist = pid;
	}
	while (!shared->stop) {
		pid_t pid = waitpid(-1, &status, WNOHANG);

		if (time(NULL) >= end)
			break;
		if (pid <= 0) {
			usleep(1000);
			continue;
		}
		/* The OOM killer may end one */
		if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
			printf("process %d: signal %d\n", pid, WTERMSIG(status));
			shared->failed = 1;
			break;
		}
		for (int k = 0; k < processes; k++) {
			if (shared->pids[k] != pid)
				continue;
			rng = (seed << 32) + pid * 7919;
			shared->pids[k] = fork();
			if (!shared->pids[k]) {
				rng = (seed << 32) ^ getpid() * 7919;
				window(BASE);
				work(k);
			}
		}
	}
	shared->stop = 1;
	while (waitpid(-1, &status, 0) > 0)
		if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
			printf("a process ended by signal %d\n", WTERMSIG(status));
			shared->failed = 1;
		}
	check_that_nothing_is_left();
	check_that_enough_happened(seconds);
	printf("stress: %s: pages named: %lu merged, %lu shared, %lu differ, %lu absent, %lu busy, %lu ineligible, %lu full, "
	       "%lu foreign; %lu written, %lu checked, %lu forks; %lu held, and named %lu times; %lu duels; "
	       "%lu unplugged\n", shared->failed ? "FAILED" : "good",
	       shared->outcomes[KSM_PAGE_MERGED], shared->outcomes[KSM_PAGE_SHARED], shared->outcomes[KSM_PAGE_DIFFERS],
	       shared->outcomes[KSM_PAGE_ABSENT] + shared->outcomes[KSM_PAGE_GONE], shared->outcomes[KSM_PAGE_BUSY],
	       shared->outcomes[KSM_PAGE_INELIGIBLE], shared->outcomes[KSM_PAGE_FULL],
	       shared->outcomes[KSM_PAGE_FOREIGN], shared->writes, shared->checked, shared->forks, shared->held.rounds, shared->held.named,
	       shared->duels, shared->unplugged);
	return shared->failed;
}
