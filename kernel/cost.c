// SPDX-License-Identifier: GPL-2.0
/*
 * Instructions that the kernel takes for a merged page: by ksmd, and on request by /dev/ksm. And for a page that is hashed in
 * place, and one that is copied by process_vm_readv.
 *
 * To be run as root on one processor under QEMU's -icount shift=1, where two nanoseconds are one instruction, with nothing
 * else running. Other arguments are names of cases; default: all. Prints a line of text for each.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <linux/ksm.h>

#define PAGE 4096UL
static size_t n = 16384; /* pages on each side: 64 MiB */
static int dev, own;

static void fill(uint64_t *w, uint64_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15ULL + 1;

	for (size_t i = 0; i < PAGE / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		w[i] = x;
	}
}

static long knob(const char *name, const char *value)
{
	char path[128], buf[64] = "";
	int fd;

	snprintf(path, sizeof(path), "/sys/kernel/mm/ksm/%s", name);
	fd = open(path, value ? O_WRONLY : O_RDONLY);
	if (fd < 0 || (value ? write(fd, value, strlen(value)) : read(fd, buf, sizeof(buf) - 1)) < 0) {
		fprintf(stderr, "%s: %s\n", path, strerror(errno));
		exit(1);
	}
	close(fd);
	return atol(buf);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

/* CPU time of ksmd */
static double ksmd_time(void)
{
	static clockid_t clock;
	struct timespec t;

	for (int pid = 2; !clock && pid < 1000; pid++) {
		char path[64], name[32] = "";
		int fd;

		snprintf(path, sizeof(path), "/proc/%d/comm", pid);
		fd = open(path, O_RDONLY);
		if (fd < 0)
			continue;
		if (read(fd, name, sizeof(name) - 1) > 0 && !strcmp(name, "ksmd\n") && clock_getcpuclockid(pid, &clock))
			exit(4);
		close(fd);
	}
	clock_gettime(clock, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

/* What ksmd takes until all is merged: two full scans, as a checksum must be seen twice. It sleeps after each. */
static double scan(void)
{
	long scans = knob("full_scans", NULL);
	double began = ksmd_time(), took;

	knob("run", "1");
	while (knob("full_scans", NULL) < scans + 2)
		usleep(1000);
	took = ksmd_time() - began;
	knob("run", "0");
	return took;
}

static char *map(size_t pages)
{
	char *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		exit(1);
	madvise(p, pages * PAGE, MADV_NOHUGEPAGE);
	return p;
}

/* The last two: pairs that differ in the last word of the page, and everywhere */
enum { PAIRS, SHUFFLED, BESIDE, IDENTICAL, ZERO, WRONG, UNLIKE, KINDS };
static const char *const names[KINDS] = { "pairs", "shuffled", "beside", "identical", "zero", "wrong", "unlike" };

static char *a, *b, *rest;
static uint32_t *order;

static void prepare(int kind)
{
	a = map(n);
	b = map(n);
	rest = kind == BESIDE ? map(2 * n) : NULL;
	order = malloc(n * sizeof(*order));
	srand(1);
	for (size_t i = 0; i < n; i++)
		order[i] = i;
	for (size_t i = n; kind == SHUFFLED && i-- > 1;) {
		size_t j = rand() % (i + 1);
		uint32_t x = order[i];

		order[i] = order[j];
		order[j] = x;
	}
	for (size_t i = 0; i < n; i++) {
		uint64_t seed = kind == IDENTICAL ? 7 : i + 1;

		fill((uint64_t *)(a + i * PAGE), seed);
		fill((uint64_t *)(b + order[i] * PAGE), kind >= WRONG ? seed + n : seed);
		if (kind == WRONG)
			memcpy(b + i * PAGE, a + i * PAGE, PAGE - 8);
		if (kind == ZERO) {
			memset(a + i * PAGE, 0, PAGE);
			memset(b + i * PAGE, 0, PAGE);
		}
	}
	for (size_t i = 0; rest && i < 2 * n; i++)
		fill((uint64_t *)(rest + i * PAGE), 1000000 + i);
}

static void forget(void)
{
	munmap(a, n * PAGE);
	munmap(b, n * PAGE);
	if (rest)
		munmap(rest, 2 * n * PAGE);
	free(order);
	knob("run", "2");
	knob("run", "0");
}

/* Ranges of `run` pages, 512 in a call. Returns the number of merged pages. */
static size_t request(int kind, size_t run, double *took)
{
	static struct ksm_merge_range range[512];
	struct ksm_merge m = { .version = KSM_ABI_VERSION, .range_size = sizeof(*range), .ranges = (uintptr_t)range };
	size_t merged = 0, total = kind == IDENTICAL || kind == ZERO ? 2 * n : n;
	double began = now();

	if (kind == SHUFFLED)
		run = 1;
	for (size_t i = 0; i < total;) {
		size_t used = 0;

		for (; used < 512 && i < total; used++) {
			struct ksm_merge_range *r = &range[used];
			size_t length = total - i < run ? total - i : run;
			char *take = i < n && kind != IDENTICAL && kind != ZERO ? b + order[i] * PAGE :
				     i < n ? a + i * PAGE : b + (i - n) * PAGE;

			if ((kind == IDENTICAL || kind == ZERO) && i < n && length > n - i)
				length = n - i;
			*r = (struct ksm_merge_range){
				.keep_pidfd = own, .take_pidfd = own, .nr_pages = length,
				.keep_addr = (uintptr_t)(a + i * PAGE), .take_addr = (uintptr_t)take,
			};
			if (kind == IDENTICAL) {
				r->flags = KSM_MERGE_KEEP_ONE;
				/* max_page_sharing is 256 */
				r->keep_addr = (uintptr_t)take - i % 256 * PAGE;
			} else if (kind == ZERO) {
				r->flags = KSM_MERGE_ZERO;
				r->keep_pidfd = -1;
				r->keep_addr = 0;
			}
			i += length;
		}
		m.nr_ranges = used;
		if (ioctl(dev, KSM_IOC_MERGE, &m) != (int)used)
			exit(2);
		for (size_t k = 0; k < used; k++) {
			if (range[k].status)
				exit(3);
			merged += range[k].nr_merged;
		}
	}
	*took = now() - began;
	return merged;
}

static void print(int kind, const char *how, double took, size_t pages, size_t merged)
{
	printf("%-10s %-12s %8.0f instructions a pair or merged page (%zu of %zu merged)\n", names[kind], how,
	       took / 2 / (merged ?: pages / 2), merged, pages);
	fflush(stdout);
}

/* Pages that differ everywhere, in runs of so many */
static void hash(void)
{
	static const size_t runs[] = { 256, 4 };
	static const int lines[] = { 1, 2, 8, 32, 64 };
	static char copy[256 * PAGE];
	static uint64_t hashes[256];

	prepare(PAIRS);
	memset(copy, 1, sizeof(copy));
	for (size_t r = 0; r < sizeof(runs) / sizeof(*runs); r++) {
		size_t run = runs[r];
		double began;

		for (size_t l = 0; l < sizeof(lines) / sizeof(*lines); l++) {
			began = now();
			for (size_t i = 0; i < n; i += run) {
				struct ksm_hash h = {
					.version = KSM_ABI_VERSION, .pidfd = own, .to = lines[l], .nr_pages = run,
					.addr = (uintptr_t)(a + i * PAGE), .key = 7, .hashes = (uintptr_t)hashes,
				};

				if (ioctl(dev, KSM_IOC_HASH, &h) || h.nr_done != run)
					exit(5);
			}
			printf("hash       run %-8zu %8.0f instructions a page by %d lines\n", run, (now() - began) / 2 / n,
			       lines[l]);
		}
		began = now();
		for (size_t i = 0; i < n; i += run) {
			struct iovec from = { a + i * PAGE, run * PAGE }, to = { copy, run * PAGE };

			if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != (ssize_t)(run * PAGE))
				break;
		}
		printf("copy       run %-8zu %8.0f instructions a page\n", run, (now() - began) / 2 / n);
	}
	fflush(stdout);
	forget();
}

int main(int argc, char **argv)
{
	static const size_t runs[] = { 256, 32, 1 };

	dev = open("/dev/ksm", O_RDWR);
	own = syscall(SYS_pidfd_open, getpid(), 0);
	knob("run", "2");
	knob("run", "0");
	knob("pages_to_scan", "4294967295");
	knob("sleep_millisecs", "100");
	if (dev >= 0 && (argc < 2 || !strcmp(argv[1], "hash")))
		hash();
	for (int kind = 0; kind < KINDS; kind++) {
		double took;
		int asked = argc < 2;
		size_t merged;

		for (int i = 1; i < argc; i++)
			asked |= !strcmp(argv[i], names[kind]);
		if (!asked)
			continue;
		if (kind < WRONG && kind != SHUFFLED) {
			prepare(kind);
			knob("use_zero_pages", kind == ZERO ? "1" : "0");
			madvise(a, n * PAGE, MADV_MERGEABLE);
			madvise(b, n * PAGE, MADV_MERGEABLE);
			if (rest)
				madvise(rest, 2 * n * PAGE, MADV_MERGEABLE);
			took = scan();
			merged = knob("pages_sharing", NULL) + knob("ksm_zero_pages", NULL);
			print(kind, "ksmd", took, 2 * n, merged);
			forget();
		}
		for (size_t r = 0; dev >= 0 && r < sizeof(runs) / sizeof(*runs); r++) {
			char how[32];

			if (kind == SHUFFLED && runs[r] != 1)
				continue;
			prepare(kind);
			merged = request(kind, runs[r], &took);
			snprintf(how, sizeof(how), "run %zu", runs[r]);
			print(kind, how, took, 2 * n, merged);
			forget();
		}
	}
	return 0;
}
