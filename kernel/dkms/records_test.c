// SPDX-License-Identifier: GPL-2.0
/*
 * A process with many records: what calls cost it, how long others wait while its records are freed, and how many are left.
 * usage: records_test, as root, with /dev/ksm, on one processor under QEMU's -icount shift=1 (two nanoseconds are one instruction).
 */
#define _GNU_SOURCE
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <linux/ksm.h>

#define PAGE	4096UL
#define RECORDS	128000UL
#define NEAR	4096UL	/* pages before, between and after those that have records */
#define OTHERS	400	/* processes */

#define CHECK(what) do { if (!(what)) { printf("not ok: line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static int dev, own;
static char *start;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static long pages_sharing(void)
{
	char buf[32] = "";
	int fd = open("/sys/kernel/mm/ksm/pages_sharing", O_RDONLY);

	CHECK(fd >= 0 && read(fd, buf, sizeof(buf) - 1) > 0);
	close(fd);
	return atol(buf);
}

/* Names so many new pairs, which are equal or differ by a number. Returns the instructions a pair. */
static double request(char *keep, char *take, size_t n, unsigned long seed, unsigned long differ)
{
	struct ksm_merge_range r = {
		.keep_addr = (uintptr_t)keep, .take_addr = (uintptr_t)take, .nr_pages = n, .keep_pidfd = own, .take_pidfd = own,
	};
	struct ksm_merge m = { .version = KSM_ABI_VERSION, .range_size = sizeof(r), .ranges = (uintptr_t)&r, .nr_ranges = 1 };
	double began;

	for (size_t i = 0; i < n; i++) {
		*(unsigned long *)(keep + i * PAGE) = seed + i;
		*(unsigned long *)(take + i * PAGE) = seed + i + differ;
	}
	began = now();
	CHECK(ioctl(dev, KSM_IOC_MERGE, &m) == 1 && !r.status && r.nr_done == n && r.nr_merged == (differ ? 0 : n));
	return (now() - began) / 2 / n;
}

static double merge(char *keep, char *take, size_t n, unsigned long seed)
{
	return request(keep, take, n, seed, 0);
}

/* The same for 32 calls */
static double merge_calls(char *keep, char *take, size_t n, unsigned long seed)
{
	double sum = 0;

	for (size_t i = 0; i < 32; i++)
		sum += merge(keep + i * n * PAGE, take + i * n * PAGE, n, seed + i * n);
	return sum / 32;
}

/* The child stays with what it got from its parent, which ends. */
static pid_t parent_of(pid_t *child)
{
	int p[2];
	pid_t pid;

	CHECK(!pipe(p));
	pid = fork();
	if (!pid) {
		char *keep = start + NEAR * PAGE, *take = keep + (RECORDS / 2 + NEAR) * PAGE;

		own = syscall(SYS_pidfd_open, getpid(), 0);
		for (size_t i = 0; i < RECORDS / 2; i += 2000) {
			madvise(keep + i * PAGE, 2000 * PAGE, MADV_DONTNEED);
			merge(keep + i * PAGE, take + i * PAGE, 2000, (1UL << 50) + i);
		}
		*child = fork();
		if (!*child) {
			close(p[0]);
			close(p[1]);
			pause();
		}
		CHECK(write(p[1], child, sizeof(*child)) == sizeof(*child));
		_exit(0);
	}
	CHECK(read(p[0], child, sizeof(*child)) == sizeof(*child));
	close(p[0]);
	close(p[1]);
	return pid;
}

int main(void)
{
	size_t all = RECORDS + 3 * NEAR;
	char *between, *end, *few = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	double first, last, calls, far, differ, alone, beside, longest = 0, began;
	pid_t pids[OTHERS], pid, child;
	int status;

	start = mmap(NULL, all * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	between = start + (NEAR + RECORDS / 2) * PAGE;
	end = start + (all - NEAR) * PAGE;
	CHECK(start != MAP_FAILED && !madvise(start, all * PAGE, MADV_NOHUGEPAGE));
	dev = open("/dev/ksm", O_RDWR);
	own = syscall(SYS_pidfd_open, getpid(), 0);
	CHECK(dev >= 0 && own >= 0);

	for (size_t i = 0; i < RECORDS / 2; i += 2000)
		merge(start + (NEAR + i) * PAGE, between + (NEAR + i) * PAGE, 2000, (1UL << 32) + i);
	first = merge(start, start + 1024 * PAGE, 1024, 1UL << 33);
	last = merge(end, end + 1024 * PAGE, 1024, 1UL << 34);
	calls = merge_calls(end + 2048 * PAGE, end + 3072 * PAGE, 32, 1UL << 35);
	far = merge_calls(start + 2048 * PAGE, between, 32, 1UL << 36);
	printf("records    run 1024, of %lu records, at the start of the list: %.0f instructions a pair; at its end: %.0f\n",
	       RECORDS, first, last);
	printf("records    run 32, at the end: %.0f; at the start and in the middle: %.0f\n", calls, far);
	differ = request(end, end + 1024 * PAGE, 1024, 1UL << 39, 1);
	printf("records    run 1024, which differ at once: %.0f\n", differ);
	/* No pte is cleared, and no folio locked */
	CHECK(differ <= 700);
	CHECK(last <= 1.2 * first);
	CHECK(calls <= 12000 && far <= 12000);

	/* Other processes that KSM knows */
	munmap(start, all * PAGE);
	alone = merge_calls(few, few + 32 * PAGE, 1, 1UL << 37);
	for (int i = 0; i < OTHERS; i++) {
		pids[i] = fork();
		if (pids[i])
			continue;
		madvise(few, PAGE, MADV_MERGEABLE);
		pause();
	}
	usleep(100000);
	/* What is done after exits may fall into one of them */
	beside = merge_calls(few, few + 32 * PAGE, 1, 1UL << 38);
	for (unsigned long i = 1; i < 3; i++) {
		double again = merge_calls(few, few + 32 * PAGE, 1, (1UL << 38) + 32 * i);

		beside = again < beside ? again : beside;
	}
	printf("records    run 1, of a process alone: %.0f; beside %d others: %.0f\n", alone, OTHERS, beside);
	for (int i = 0; i < OTHERS; i++)
		CHECK(!kill(pids[i], SIGKILL) && waitpid(pids[i], &status, 0) == pids[i]);
	CHECK(beside <= 1.2 * alone);

	/* Records that can't be freed, as a forked process relies on them */
	start = mmap(NULL, all * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	madvise(start, all * PAGE, MADV_NOHUGEPAGE);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	pid = parent_of(&child);
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	for (began = now(); now() - began < 1e9;) {
		double took = merge(few, few + 32 * PAGE, 1, (unsigned long)now());

		longest = took > longest ? took : longest;
		usleep(500);
	}
	printf("records    run 1, while records are looked at, at most %.0f\n", longest);
	CHECK(longest < 2000000);
	CHECK(pages_sharing() >= (long)RECORDS / 2);
	CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
	munmap(few, 64 * PAGE);
	/* Those of this process, which lives, are left: it merged its few pages again and again. The next round begins within 64 s. */
	for (int i = 0; i < 5000 && pages_sharing() > 64; i++)
		usleep(20000);
	CHECK(pages_sharing() <= 64);
	printf("# PASSED: records_test\n");
	return 0;
}
