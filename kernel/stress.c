// SPDX-License-Identifier: GPL-2.0
/*
 * Merges, writes, forks, exits, moves, swaps, splits and pins at once, and checks every byte.
 *
 * usage: stress SECONDS [PROCESSES [SEED]], as root, with /dev/ksm, and swap on /dev/ram0. Each process has a window of pages whose
 * contents it knows, and does random things to it. Two mergers name random pairs of pages of random processes, right and wrong
 * ones, by KSM_IOC_MERGE, and hash others. Another process turns KSM's knobs. A process that finds a byte that it did not write
 * prints it and aborts, and the stress fails. With MAKE_IT_FAIL in the environment, allocations for the mergers and for KSM's
 * knobs fail, as /sys/kernel/debug/failslab and fail_page_alloc say.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
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
#include <linux/ksm.h>

#define PAGE	4096UL
#define PAGES	1024UL /* of a window: 4 MiB, aligned to huge pages */
#define WINDOW	(PAGES * PAGE)
#define BASE	((char *)0x200000000000UL)
#define OTHER	((char *)0x210000000000UL)
#define MOST	64

static struct shared {
	volatile int pids[MOST];
	char *volatile at[MOST]; /* where the window is */
	volatile int stop, failed;
	volatile unsigned long outcomes[KSM_PAGE_GONE + 1], writes, forks, checked;
} *shared;
static uint8_t content[PAGES]; /* of this process: which of 256 contents each page has */
static int disk; /* its first page is the header of the swap space, which never changes */
static char header[PAGE] __attribute__((aligned(4096)));
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

static void check(char *base, size_t i, const char *when)
{
	uint64_t *w = (uint64_t *)(base + i * PAGE);

	for (int k = 0; k < 512; k++) {
		if (w[k] == word(content[i], k))
			continue;
		printf("CORRUPT: process %d, page %zu, word %d: %llx instead of %llx, after %s\n", getpid(), i, k,
		       (unsigned long long)w[k], (unsigned long long)word(content[i], k), when);
		fflush(stdout);
		shared->failed = 1;
		shared->stop = 1;
		abort();
	}
	__sync_fetch_and_add(&shared->checked, 1);
}

/* The disk writes to pages that are pinned meanwhile, by GUP-fast */
static void read_disk(char *base, size_t i, size_t n)
{
	for (size_t k = i; k < i + n; k++) {
		char *p = base + k * PAGE;

		if (pread(disk, p, PAGE, 0) != (ssize_t)PAGE)
			return;
		if (memcmp(p, header, PAGE)) {
			printf("CORRUPT: process %d, page %zu, read from disk\n", getpid(), k);
			fflush(stdout);
			shared->failed = shared->stop = 1;
			abort();
		}
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
			/* A word is written as it is: it must land in this process only */
			for (size_t k = i; k < i + n; k++)
				((volatile uint64_t *)(base + k * PAGE))[rnd(512)] += 0;
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
			char copy[PAGE];
			int p[2];

			/* A pin through which the kernel reads later */
			last = "splice";
			if (pipe(p))
				break;
			if (vmsplice(p[1], &iov, 1, 0) == (ssize_t)PAGE) {
				usleep(rnd(300));
				if (read(p[0], copy, PAGE) == (ssize_t)PAGE && memcmp(copy, iov.iov_base, PAGE)) {
					printf("CORRUPT: a spliced page\n");
					shared->failed = shared->stop = 1;
				}
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
			memset(content, 0, sizeof(content));
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

static void write_file(const char *path, const char *what)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0)
		return;
	if (write(fd, what, strlen(what)) < 0 && errno != EBUSY && errno != EINVAL && errno != EIO && errno != EAGAIN && errno != ENOMEM)
		perror(path);
	close(fd);
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

static void merge(int processes)
{
	static struct ksm_merge_range range[64];
	static uint8_t status[64][64];
	int dev = open("/dev/ksm", O_RDWR), fds[MOST], fresh = 0;

	if (dev < 0) {
		perror("/dev/ksm");
		shared->failed = shared->stop = 1;
		_exit(1);
	}
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
				.nr_pages = length, .page_status = (uintptr_t)status[k],
				.flags = kind == 1 ? KSM_MERGE_KEEP_ONE : 0,
			};
			if (!kind) {
				range[k].flags = KSM_MERGE_ZERO;
				range[k].keep_pidfd = -1;
				range[k].keep_addr = 0;
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

static long read_file(const char *path)
{
	char buf[32] = "";
	int fd = open(path, O_RDONLY);

	if (fd < 0 || read(fd, buf, sizeof(buf) - 1) < 0)
		return -1;
	close(fd);
	return atol(buf);
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

int main(int argc, char **argv)
{
	int seconds = argc > 1 ? atoi(argv[1]) : 30, processes = argc > 2 ? atoi(argv[2]) : 6, status;
	uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
	time_t end = time(NULL) + seconds;

	if (processes > MOST)
		processes = MOST;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	disk = open("/dev/ram0", O_RDONLY | O_DIRECT);
	if (disk < 0 || pread(disk, header, PAGE, 0) != (ssize_t)PAGE) {
		perror("/dev/ram0");
		return 1;
	}
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	for (int k = -3; k < processes; k++) {
		pid_t pid = fork();

		rng = (seed << 32) + k * 7919 + 12345;
		if (!pid) {
			if (k < -1)
				merge(processes);
			if (k == -1)
				turn();
			window(BASE);
			work(k);
		}
		if (k >= 0)
			shared->pids[k] = pid;
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
				memset(content, 0, sizeof(content));
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
	printf("stress: %s: pages named: %lu merged, %lu shared, %lu differ, %lu absent, %lu busy, %lu ineligible, %lu full; "
	       "%lu written, %lu checked, %lu forks\n", shared->failed ? "FAILED" : "good",
	       shared->outcomes[KSM_PAGE_MERGED], shared->outcomes[KSM_PAGE_SHARED], shared->outcomes[KSM_PAGE_DIFFERS],
	       shared->outcomes[KSM_PAGE_ABSENT] + shared->outcomes[KSM_PAGE_GONE], shared->outcomes[KSM_PAGE_BUSY],
	       shared->outcomes[KSM_PAGE_INELIGIBLE], shared->outcomes[KSM_PAGE_FULL], shared->writes, shared->checked, shared->forks);
	return shared->failed;
}
