// SPDX-License-Identifier: GPL-2.0
/*
 * Calls /dev/ksm with arguments that are mostly wrong.
 *
 * usage: fuzz SECONDS [SEED], as root. Some processes with known contents, which are killed and started again; three callers
 * without and one with rights; bad pidfds, addresses that are unaligned, wrap, overlap, are not mapped, lengths of all sizes,
 * arguments that are unmapped in part or changed by another thread meanwhile. It fails if contents change, a page is merged by
 * one who has no rights, or an answer contradicts itself. What the kernel says to it is for the caller to look at.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <linux/ksm.h>

#define PAGE	4096UL
#define PAGES	256UL
#define BASE	((char *)0x200000000000UL)
#define TARGETS	4

static struct shared {
	volatile int pids[TARGETS], stop, failed;
	volatile unsigned long calls, merged, hashed, good, denied;
} *shared;
static uint64_t rng;
static char *arena;   /* where results go, and beside them nothing */
static char *ranges;  /* the same for arguments */
#define ARENA	(64 * PAGE)

static uint32_t rnd(uint32_t below)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return (rng >> 20) % below;
}

static void fail(const char *why)
{
	printf("fuzz: %s\n", why);
	fflush(stdout);
	shared->failed = shared->stop = 1;
}

static void target(void)
{
	char *p = mmap(BASE, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	if (rnd(2))
		madvise(p, PAGES * PAGE, MADV_HUGEPAGE);
	for (size_t i = 0; i < PAGES; i++)
		if (i % 7)
			memset(p + i * PAGE, i % 5, PAGE);
	munmap(p + 100 * PAGE, PAGE * 5);
	while (!shared->stop) {
		for (size_t i = 0; i < PAGES; i++) {
			char want = i % 7 ? i % 5 : 0;

			if (i >= 100 && i < 105)
				continue;
			if (p[i * PAGE] != want || memcmp(p + i * PAGE, p + i * PAGE + 1, PAGE - 1))
				fail("a target's page has changed");
			if (rnd(4) == 0)
				memset(p + i * PAGE, want, PAGE);
		}
		if (rnd(20) == 0)
			break;
		usleep(rnd(3000));
	}
	_exit(0);
}

static uint64_t number(void)
{
	static const uint64_t odd[] = { 0, 1, 2, 31, 32, 255, 256, 511, 512, 513, 1024, 1025, 65536, 65537, 262144, 262145,
		~0ULL, ~0ULL >> 1, 1ULL << 63, ~0ULL >> 12, (~0ULL >> 12) + 1, 1ULL << 47, 1ULL << 52, 0x7fffffffffff };

	switch (rnd(4)) {
	case 0: return odd[rnd(sizeof(odd) / sizeof(*odd))];
	case 1: return (uint64_t)rnd(~0U) << rnd(40);
	default: return rnd(300);
	}
}

static uint64_t address(void)
{
	switch (rnd(12)) {
	case 0: return number();
	case 1: return number() * PAGE;
	case 2: return -(uint64_t)rnd(10) * PAGE;
	case 3: return 0x7ffffffff000 - rnd(5) * PAGE;
	case 4: return (uint64_t)(uintptr_t)BASE + rnd(PAGES * PAGE);
	case 5: return (uint64_t)(uintptr_t)arena + rnd(64) * PAGE;
	default: return (uint64_t)(uintptr_t)BASE + rnd(PAGES) * PAGE;
	}
}

static int some_fd(const int *fds)
{
	return rnd(12) ? fds[rnd(TARGETS + 1)] : (int)number();
}

static void *scribble(void *unused)
{
	unsigned int at = 1;

	while (!shared->stop) {
		at = at * 1103515245 + 12345;
		if (at % 64 == 0)
			mprotect(arena + at / 64 % 64 * PAGE, PAGE, at >> 20 & 1 ? PROT_NONE : PROT_READ | PROT_WRITE);
		usleep(50);
	}
	return unused;
}

static void caller(int rights)
{
	int dev = open("/dev/ksm", O_RDWR), fds[TARGETS + 1], fresh = 0;
	pthread_t thread;

	arena = mmap(NULL, ARENA + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ranges = mmap(NULL, ARENA + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(arena + ARENA, 2 * PAGE);
	munmap(ranges + ARENA, 2 * PAGE);
	memset(fds, -1, sizeof(fds));
	if (getenv("MAKE_IT_FAIL")) {
		int fd = open("/proc/self/make-it-fail", O_WRONLY);

		if (fd < 0 || write(fd, "1", 1) != 1)
			fail("make-it-fail");
		close(fd);
	}
	while (!rights && (setgid(65534) || setuid(65534)))
		if (errno != ENOMEM)
			fail("setuid");
	if (rights == 2)
		pthread_create(&thread, NULL, scribble, NULL);
	while (!shared->stop) {
		static struct ksm_merge_range copy[64];
		struct ksm_merge m = { .version = KSM_ABI_VERSION, .range_size = sizeof(*copy) };
		int n = 1 + rnd(20), got;
		char *place = ranges + rnd(rnd(2) ? 64 : ARENA);

		if (!fresh--) {
			for (int k = 0; k <= TARGETS; k++) {
				if (fds[k] >= 0)
					close(fds[k]);
				fds[k] = syscall(SYS_pidfd_open, k < TARGETS ? shared->pids[k] : getpid(), 0);
			}
			fresh = 30;
		}
		__sync_fetch_and_add(&shared->calls, 1);
		if (rnd(4) == 0) {
			struct ksm_hash h = {
				.version = rnd(20) ? KSM_ABI_VERSION : number(), .flags = rnd(20) ? 0 : number(),
				.pidfd = rights ? some_fd(fds) : fds[rnd(TARGETS)], .from = rnd(3) ? 0 : rnd(70), .to = rnd(66),
				.addr = address(), .nr_pages = number(), .key = number(),
				.hashes = rnd(3) ? (uintptr_t)arena : address(), .reserved = rnd(30) ? 0 : number(),
			};

			/* Not over what the targets of this address in this process would be */
			got = ioctl(dev, KSM_IOC_HASH, rnd(20) ? (uintptr_t)&h : address());
			if (!got && !rights)
				fail("hashed without rights");
			if (!got) {
				__sync_fetch_and_add(&shared->hashed, h.nr_done);
				if (h.nr_done > h.nr_pages)
					fail("too many hashes");
			}
			continue;
		}
		for (int k = 0; k < n; k++)
			copy[k] = (struct ksm_merge_range){
				.keep_addr = address(), .take_addr = address(), .nr_pages = number(),
				.page_status = rnd(3) ? 0 : rnd(2) ? (uintptr_t)arena + 32 * PAGE : address(),
				.keep_pidfd = rights ? some_fd(fds) : fds[rnd(TARGETS)],
				.take_pidfd = rights ? some_fd(fds) : fds[rnd(TARGETS)],
				.flags = rnd(8) ? rnd(2) : number(), .reserved = rnd(20) ? 0 : number(), .keep_mappers = rnd(2) ? 0 : number(),
				.nr_done = number(), .nr_merged = number(), .status = number(),
			};
		for (int k = 0; k < n; k++)
			if (rnd(6) == 0) {
				copy[k].flags = KSM_MERGE_ZERO;
				copy[k].keep_addr = 0;
				copy[k].keep_pidfd = -1;
			}
		if (rights == 1 && place + n * sizeof(*copy) <= ranges + ARENA) {
			memcpy(place, copy, n * sizeof(*copy));
			m.ranges = (uintptr_t)place;
		} else {
			m.ranges = rnd(10) ? (uintptr_t)copy : address();
		}
		m.nr_ranges = rnd(20) ? n : number();
		if (rnd(20) == 0)
			m.version = number();
		if (rnd(20) == 0)
			m.range_size = number();
		if (rnd(20) == 0)
			m.reserved = number();
		got = ioctl(dev, rnd(50) ? KSM_IOC_MERGE : rnd(~0U), rnd(50) ? (uintptr_t)&m : address());
		if (m.ranges == (uintptr_t)place)
			memcpy(copy, place, n * sizeof(*copy));
		for (int k = 0; k < got && k < n && m.ranges != 0; k++) {
			if (m.ranges != (uintptr_t)place && m.ranges != (uintptr_t)copy)
				break;
			if (copy[k].nr_merged > copy[k].nr_done || copy[k].nr_done > copy[k].nr_pages)
				fail("numbers that cannot be");
			if (!rights && (copy[k].nr_done || !copy[k].status))
				fail("done without rights");
			if (copy[k].status == -EACCES || copy[k].status == -EPERM)
				__sync_fetch_and_add(&shared->denied, 1);
			if (!copy[k].status)
				__sync_fetch_and_add(&shared->good, 1);
			__sync_fetch_and_add(&shared->merged, copy[k].nr_merged);
		}
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 10);
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
	int status;

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int k = 0; k < 4; k++)
		if (!fork()) {
			rng = (seed << 32) + k * 7919 + 17;
			caller(k == 0 ? 0 : k == 3 ? 2 : 1);
		}
	while (time(NULL) < end && !shared->stop) {
		for (int k = 0; k < TARGETS; k++) {
			if (shared->pids[k] && waitpid(shared->pids[k], &status, WNOHANG) <= 0) {
				if (rnd(500) == 0)
					kill(shared->pids[k], SIGKILL);
				continue;
			}
			if (shared->pids[k] && WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
				fail("a target has crashed");
			shared->pids[k] = fork();
			if (!shared->pids[k]) {
				rng = (seed << 32) ^ getpid() * 7919;
				target();
			}
		}
		rng = rng * 6364136223846793005ULL + seed + 1;
		usleep(2000);
	}
	shared->stop = 1;
	while (wait(&status) > 0)
		;
	printf("fuzz: %s: %lu calls, %lu ranges good, %lu denied, %lu pages merged, %lu hashed\n",
	       shared->failed ? "FAILED" : "good", shared->calls, shared->good, shared->denied, shared->merged, shared->hashed);
	return shared->failed;
}
