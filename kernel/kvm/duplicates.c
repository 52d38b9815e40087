// SPDX-License-Identifier: GPL-2.0
/*
 * Counts the exact duplicates in the memory of guests, and how many of them are merged.
 *
 * usage: duplicates PID...      processes, stopped, with the guests' memory in private anonymous mappings of 32 MiB or more
 *
 * Prints, of all their pages together: pages present, contents, frames, duplicates (pages less contents), merged (pages less frames),
 * and the share of the duplicates that are merged, in permille; then the same without pages of zeros, since Linux 6.12 itself maps its
 * zero page for them when it splits a huge page. Compares by two hashes of all words of a page.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE	4096UL
#define LEAST	(32UL << 20)
#define MOST	(1UL << 20)

struct digest {
	uint64_t a, b;
};

struct page {
	struct digest digest;
	uint64_t frame;
};

static struct page *all;
static size_t pages;

static void open_failed(const char *path)
{
	perror(path);
	exit(1);
}

static int open_of(const char *pid, const char *name)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/proc/%s/%s", pid, name);
	fd = open(path, O_RDONLY);
	if (fd < 0)
		open_failed(path);
	return fd;
}

static struct digest digest_of(const uint64_t *word)
{
	struct digest digest = { 1, 2 };

	for (size_t k = 0; k < PAGE / 8; k++) {
		digest.a = (digest.a ^ word[k]) * 0x9e3779b97f4a7c15ULL;
		digest.a ^= digest.a >> 32;
		digest.b = (digest.b + word[k]) * 0xc2b2ae3d27d4eb4fULL;
		digest.b ^= digest.b >> 29;
	}
	return digest;
}

static void read_pages(int pagemap, int memory, uint64_t start, uint64_t end)
{
	static uint64_t entries[512], page[PAGE / 8];

	for (uint64_t at = start; at < end; at += sizeof(entries) / 8 * PAGE) {
		ssize_t got = pread(pagemap, entries, sizeof(entries), at / PAGE * 8);

		for (ssize_t k = 0; k < got / 8 && at + k * PAGE < end; k++) {
			/* Present, and a frame that root may see */
			if (!(entries[k] >> 63))
				continue;
			if (pread(memory, page, PAGE, at + k * PAGE) != (ssize_t)PAGE || pages == MOST) {
				fprintf(stderr, "a page can't be read\n");
				exit(1);
			}
			all[pages++] = (struct page){ digest_of(page), entries[k] & ((1ULL << 55) - 1) };
		}
	}
}

static int compare_digests(const void *a, const void *b)
{
	return memcmp(&((const struct page *)a)->digest, &((const struct page *)b)->digest, sizeof(struct digest));
}

static int compare_frames(const void *a, const void *b)
{
	return memcmp(&((const struct page *)a)->frame, &((const struct page *)b)->frame, sizeof(uint64_t));
}

static size_t distinct(size_t count, int (*compare)(const void *, const void *))
{
	size_t result = count > 0;

	qsort(all, count, sizeof(*all), compare);
	for (size_t k = 1; k < count; k++)
		result += compare(&all[k - 1], &all[k]) != 0;
	return result;
}

static void print_counts(const char *of, size_t count)
{
	size_t contents = distinct(count, compare_digests), frames = distinct(count, compare_frames);

	printf("%s: %zu pages, %zu contents, %zu frames, %zu duplicates, %zu merged, %zu permille\n", of, count, contents, frames,
	       count - contents, count - frames, count > contents ? (count - frames) * 1000 / (count - contents) : 0);
}

int main(int argc, char **argv)
{
	static const uint64_t zeros[PAGE / 8];
	struct digest of_zeros = digest_of(zeros);
	size_t others = 0;

	all = malloc(MOST * sizeof(*all));
	if (!all)
		open_failed("memory");
	for (int k = 1; k < argc; k++) {
		int pagemap = open_of(argv[k], "pagemap"), memory = open_of(argv[k], "mem");
		FILE *maps = fdopen(open_of(argv[k], "maps"), "r");
		char line[512];

		while (fgets(line, sizeof(line), maps)) {
			unsigned long start, end, inode;
			char rights[8];

			if (sscanf(line, "%lx-%lx %7s %*x %*s %lu", &start, &end, rights, &inode) == 4 && !inode &&
			    !strcmp(rights, "rw-p") && end - start >= LEAST)
				read_pages(pagemap, memory, start, end);
		}
	}
	print_counts("all", pages);
	for (size_t k = 0; k < pages; k++)
		if (memcmp(&all[k].digest, &of_zeros, sizeof(of_zeros)))
			all[others++] = all[k];
	print_counts("no zeros", others);
	return 0;
}
