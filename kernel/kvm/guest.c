// SPDX-License-Identifier: GPL-2.0
/*
 * The only program of an inner guest (scripts/kvm): it knows each byte of its memory, writes pages, and checks them.
 *
 * It runs as init. The kernel's command line has settings for it: guest=N, equal=MIB and own=MIB. Three areas:
 *
 *	equal	page i has the same contents in each guest; a few pages are changed and changed back each round
 *	own	page i has other contents in each guest
 *	churn	all the time written, with one of 8 contents, so that equal pages come and go
 *
 * A round also maps, fills, checks and unmaps memory, which the balloon or free page reporting may give to the host meanwhile.
 * It prints how many pages it has written and checked, byte by byte, and CORRUPT for a byte that it didn't write.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE		4096UL
#define WORDS		(PAGE / 8)
#define CHURN		256UL /* pages */
#define FREED		2048UL /* pages that are mapped anew in each round that frees */
#define CONTENTS	8 /* of the pages of the area churn */

struct area {
	const char *name;
	uint64_t salt;
	unsigned long pages;
	uint64_t *at;
	uint8_t *version;
};

static unsigned long written, checked, wrong;
static uint64_t rng;

static uint32_t rnd(uint32_t below)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return (rng >> 20) % below;
}

/* Word k of a page. Neighbouring versions of a page differ in each word, but in the area churn only in the last ones. */
static uint64_t seed_of(const struct area *area, unsigned long page)
{
	uint64_t seed = area->salt + area->version[page] * 0x9e3779b97f4a7c15ULL + page * 0xbf58476d1ce4e5b9ULL;

	seed ^= seed >> 29;
	return seed * 0x94d049bb133111ebULL;
}

static uint64_t word(const struct area *area, unsigned long page, uint64_t seed, unsigned long k)
{
	if (area->salt)
		return seed + k * 0xd6e8feb86659fd93ULL;
	return k < WORDS - 1 ? k + 1 : area->version[page];
}

static void fill(struct area *area, unsigned long page)
{
	uint64_t *at = area->at + page * WORDS, seed = seed_of(area, page);

	for (unsigned long k = 0; k < WORDS; k++)
		at[k] = word(area, page, seed, k);
	written++;
}

static void check(struct area *area, unsigned long page)
{
	const volatile uint64_t *at = area->at + page * WORDS;
	uint64_t seed = seed_of(area, page);

	for (unsigned long k = 0; k < WORDS; k++) {
		uint64_t got = at[k], right = word(area, page, seed, k);

		if (got == right)
			continue;
		if (!wrong++)
			printf("CORRUPT: area %s, page %lu, word %lu: %llx instead of %llx\n", area->name, page, k,
			       (unsigned long long)got, (unsigned long long)right);
	}
	checked++;
}

static void map(struct area *area)
{
	area->at = mmap(NULL, area->pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	area->version = calloc(area->pages, 1);
	if (area->at == MAP_FAILED || !area->version) {
		printf("CORRUPT: no memory for the area %s\n", area->name);
		abort();
	}
	for (unsigned long page = 0; page < area->pages; page++)
		fill(area, page);
}

static void write_page(struct area *area, unsigned long page, int version)
{
	check(area, page);
	area->version[page] = version;
	fill(area, page);
	check(area, page);
}

/* The part'th of 16 parts of an area */
static void sweep(struct area *area, unsigned long part)
{
	for (unsigned long page = area->pages * part / 16; page < area->pages * (part + 1) / 16; page++)
		check(area, page);
}

static void use_and_free(uint64_t salt)
{
	struct area area = { "freed", salt, FREED, NULL, NULL };

	map(&area);
	for (unsigned long page = 0; page < area.pages; page++)
		check(&area, page);
	munmap(area.at, area.pages * PAGE);
	free(area.version);
}

static unsigned long setting(const char *name, unsigned long otherwise)
{
	const char *text = getenv(name);

	return text ? strtoul(text, NULL, 0) : otherwise;
}

int main(void)
{
	unsigned long guest = setting("guest", 1);
	struct area areas[] = {
		{ "equal", 1, setting("equal", 48) * 256, NULL, NULL },
		{ "own", 1 + guest, setting("own", 16) * 256, NULL, NULL },
		{ "churn", 0, CHURN, NULL, NULL },
	};
	unsigned long touched[2] = { 0 };
	int module = open("/virtio_balloon.ko", O_RDONLY);

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (module >= 0 && syscall(SYS_finit_module, module, "", 0))
		perror("virtio_balloon");
	rng = guest * 0x9e3779b97f4a7c15ULL;
	for (int k = 0; k < 3; k++)
		map(&areas[k]);
	for (unsigned long round = 1;; round++) {
		for (int k = 0; k < 128; k++)
			write_page(&areas[2], rnd(CHURN), rnd(CONTENTS));
		for (int k = 0; k < 2; k++) {
			write_page(&areas[0], touched[k], 0);
			touched[k] = rnd(areas[0].pages);
			write_page(&areas[0], touched[k], 1 + rnd(3));
		}
		for (int k = 0; k < 3; k++)
			sweep(&areas[k], round % 16);
		if (round % 16 == 0)
			use_and_free(100 + guest * 1000 + round);
		if (round % 16 == 0)
			printf("guest %lu: sweep %lu: %lu written, %lu checked, %lu wrong\n", guest, round / 16, written, checked, wrong);
		usleep(50000);
	}
}
