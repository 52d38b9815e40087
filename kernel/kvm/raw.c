// SPDX-License-Identifier: GPL-2.0
/*
 * Guests without an operating system, that write and check their memory, and a host that pulls that memory about meanwhile.
 *
 * usage: raw SECONDS [MIB]      two guests, each a process, each with MIB of data; whatever merges their memory runs beside
 *
 * Page i has the same contents in both guests as long as neither writes to it. Each guest writes and checks random pages, each word.
 * Whenever it exits, its host does one of these:
 *
 *	reads the dirty log, copies the pages that it names, as a migration does, and then compares all of the copy
 *	drops pages (as a balloon does), which the guest must then see as zeros
 *	writes to pages itself, as a device does
 *	removes a memslot and adds it again, with a copy of its memory elsewhere, and overwrites the old memory
 *	forks, so that all pages are write-protected
 *
 * Prints CORRUPT for each wrong word or lost page, and SKIP, and exits with 77, if /dev/kvm can't run such guests.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE		4096UL
#define WORDS		(PAGE / 8)
#define MIB		(1UL << 20)
/* The guest's memory: tables, code, stack and mailbox; the data; and data in a memslot that comes and goes. */
#define SYSTEM_SIZE	(2 * MIB)
#define TABLES		0x1000UL
#define CODE		0x10000UL
#define STACK		0x30000UL
#define MAILBOX		0x40000UL
#define DATA		(16 * MIB)
#define MOVING		(256 * MIB)
#define MOVING_PAGES	1024UL
#define MOST_PAGES	32768UL

#define PORT_PAUSE	0x10
#define PORT_WRONG	0x11

struct mailbox {
	uint64_t rng, pages, written, checked;
	/* What is wrong */
	uint64_t page, word, got, right;
	/* Which contents each page has; 0: zeros. First those of the data, then those of the memslot that comes and goes. */
	uint8_t version[MOST_PAGES + MOVING_PAGES];
};

/* What follows runs in the guest, too, which has no floating point. */
#pragma GCC target("general-regs-only")
#define IN_GUEST static inline __attribute__((always_inline))

IN_GUEST uint64_t word_of(uint64_t page, uint64_t version, uint64_t k)
{
	return version ? (page + 1) * 0x9e3779b97f4a7c15ULL + version * 0xbf58476d1ce4e5b9ULL + k * 0xd6e8feb86659fd93ULL : 0;
}

IN_GUEST uint64_t next(uint64_t *rng, uint64_t below)
{
	*rng ^= *rng << 13;
	*rng ^= *rng >> 7;
	*rng ^= *rng << 17;
	return (*rng >> 20) % below;
}

IN_GUEST void fill(volatile uint64_t *at, uint64_t page, uint64_t version)
{
	for (uint64_t k = 0; k < WORDS; k++)
		at[k] = word_of(page, version, k);
}

IN_GUEST void out(uint16_t port)
{
	asm volatile("outb %%al, %%dx" : : "a"(0), "d"(port) : "memory");
}

IN_GUEST void check(struct mailbox *box, volatile uint64_t *at, uint64_t page)
{
	for (uint64_t k = 0; k < WORDS; k++) {
		uint64_t got = at[k], right = word_of(page, box->version[page], k);

		if (got != right) {
			box->page = page;
			box->word = k;
			box->got = got;
			box->right = right;
			out(PORT_WRONG);
		}
	}
	box->checked++;
}

__attribute__((section("guest_code"), noinline, used, optimize("no-tree-loop-distribute-patterns")))
static void guest(struct mailbox *box)
{
	for (;;) {
		for (int i = 0; i < 64; i++) {
			uint64_t page = next(&box->rng, box->pages + MOVING_PAGES), address;
			volatile uint64_t *at;

			/* Most writes go to a sixteenth of the pages, so that most of what is merged stays so. */
			if (i % 4 == 0)
				page = next(&box->rng, box->pages / 16);
			address = page < box->pages ? DATA + page * PAGE : MOVING + (page - box->pages) * PAGE;
			at = (volatile uint64_t *)address;
			check(box, at, page);
			if (i % 4 == 0 || next(&box->rng, 4096) == 0) {
				box->version[page] = next(&box->rng, 4);
				fill(at, page, box->version[page]);
				box->written++;
				check(box, at, page);
			}
		}
		out(PORT_PAUSE);
	}
}

extern const char __start_guest_code[], __stop_guest_code[];

struct vm {
	int fd, vcpu;
	struct kvm_run *run;
	char *system, *data, *moving;
	char *copy; /* of data, as a migration would have it; shared, as it must not be merged */
	struct mailbox *box;
	uint64_t pages, rng, wrong;
	unsigned long dirty, logs, dropped, stored, moved, forks;
};

static void skip(const char *what)
{
	printf("SKIP: %s: %s\n", what, strerror(errno));
	exit(77);
}

__attribute__((format(printf, 2, 3))) static void corrupt(struct vm *vm, const char *format, ...)
{
	va_list list;

	if (vm->wrong++ > 8)
		return;
	va_start(list, format);
	printf("CORRUPT: process %d: ", getpid());
	vprintf(format, list);
	printf("\n");
	va_end(list);
}

static char *map(uint64_t size, int kind)
{
	char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		skip("memory");
	return at;
}

static void set_slot(struct vm *vm, int slot, uint64_t address, uint64_t size, char *at, int flags)
{
	struct kvm_userspace_memory_region region = {
		.slot = slot, .flags = flags, .guest_phys_addr = address, .memory_size = size, .userspace_addr = (uintptr_t)at,
	};

	if (ioctl(vm->fd, KVM_SET_USER_MEMORY_REGION, &region))
		skip("KVM_SET_USER_MEMORY_REGION");
}

/* 64-bit code, with the first GiB mapped as it is */
static void start(struct vm *vm)
{
	uint64_t *table = (uint64_t *)(vm->system + TABLES);
	struct kvm_sregs sregs;
	struct kvm_regs regs = {
		.rip = CODE + ((const char *)guest - __start_guest_code), .rsp = STACK - 8, .rdi = MAILBOX, .rflags = 2,
	};
	struct kvm_segment code = { .limit = 0xffffffff, .selector = 8, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1 };
	struct kvm_segment data = { .limit = 0xffffffff, .selector = 16, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1 };

	table[0] = (TABLES + PAGE) | 3;
	table[WORDS] = (TABLES + 2 * PAGE) | 3;
	for (uint64_t k = 0; k < WORDS; k++)
		table[2 * WORDS + k] = k << 21 | 0x83;
	memcpy(vm->system + CODE, __start_guest_code, __stop_guest_code - __start_guest_code);
	if (ioctl(vm->vcpu, KVM_GET_SREGS, &sregs))
		skip("KVM_GET_SREGS");
	sregs.cs = code;
	sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = data;
	sregs.cr3 = TABLES;
	sregs.cr4 |= 0x20;
	sregs.cr0 |= 0x80000001;
	sregs.efer |= 0x500;
	if (ioctl(vm->vcpu, KVM_SET_SREGS, &sregs) || ioctl(vm->vcpu, KVM_SET_REGS, &regs))
		skip("KVM_SET_SREGS");
}

/* Without a CPUID, some kernels refuse 64-bit mode. */
static void set_cpuid(struct vm *vm, int kvm)
{
	static struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[128];
	} cpuid = { .head.nent = 128 };

	if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid) || ioctl(vm->vcpu, KVM_SET_CPUID2, &cpuid))
		skip("KVM_SET_CPUID2");
}

static void create(struct vm *vm, uint64_t pages, uint64_t seed)
{
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), size;

	if (kvm < 0)
		skip("/dev/kvm");
	vm->fd = ioctl(kvm, KVM_CREATE_VM, 0);
	if (vm->fd < 0)
		skip("KVM_CREATE_VM");
	vm->pages = pages;
	vm->rng = seed;
	vm->system = map(SYSTEM_SIZE, MAP_PRIVATE);
	vm->data = map(pages * PAGE, MAP_PRIVATE);
	vm->moving = map(MOVING_PAGES * PAGE, MAP_PRIVATE);
	vm->copy = map(pages * PAGE, MAP_SHARED);
	vm->box = (struct mailbox *)(vm->system + MAILBOX);
	vm->box->rng = seed;
	vm->box->pages = pages;
	memset(vm->box->version, 1, pages + MOVING_PAGES);
	for (uint64_t page = 0; page < pages; page++)
		fill((uint64_t *)(vm->data + page * PAGE), page, 1);
	for (uint64_t page = 0; page < MOVING_PAGES; page++)
		fill((uint64_t *)(vm->moving + page * PAGE), pages + page, 1);
	memcpy(vm->copy, vm->data, pages * PAGE);
	set_slot(vm, 0, 0, SYSTEM_SIZE, vm->system, 0);
	set_slot(vm, 1, DATA, pages * PAGE, vm->data, KVM_MEM_LOG_DIRTY_PAGES);
	set_slot(vm, 2, MOVING, MOVING_PAGES * PAGE, vm->moving, 0);
	vm->vcpu = ioctl(vm->fd, KVM_CREATE_VCPU, 0);
	if (vm->vcpu < 0)
		skip("KVM_CREATE_VCPU");
	set_cpuid(vm, kvm);
	size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	vm->run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vm->vcpu, 0);
	if (vm->run == MAP_FAILED)
		skip("kvm_run");
	start(vm);
}

static void copy_dirty(struct vm *vm)
{
	static uint64_t bits[MOST_PAGES / 64];
	struct kvm_dirty_log log = { .slot = 1, .dirty_bitmap = bits };

	memset(bits, 0, sizeof(bits));
	if (ioctl(vm->fd, KVM_GET_DIRTY_LOG, &log))
		skip("KVM_GET_DIRTY_LOG");
	for (uint64_t page = 0; page < vm->pages; page++) {
		if (!(bits[page / 64] >> page % 64 & 1))
			continue;
		memcpy(vm->copy + page * PAGE, vm->data + page * PAGE, PAGE);
		vm->dirty++;
	}
	for (uint64_t page = 0; page < vm->pages; page++)
		if (memcmp(vm->copy + page * PAGE, vm->data + page * PAGE, PAGE))
			corrupt(vm, "page %lu was written, but isn't in the dirty log", page);
	vm->logs++;
}

/* Changes pages behind the guest's back. The dirty log doesn't have them, so we copy them ourselves, as QEMU does. */
static void change(struct vm *vm, int drop)
{
	for (int i = 0; i < 8; i++) {
		uint64_t page = next(&vm->rng, vm->pages / 16);
		char *at = vm->data + page * PAGE;

		vm->box->version[page] = drop ? 0 : 1 + next(&vm->rng, 3);
		if (drop)
			madvise(at, PAGE, MADV_DONTNEED);
		else
			fill((uint64_t *)at, page, vm->box->version[page]);
		memcpy(vm->copy + page * PAGE, at, PAGE);
	}
	*(drop ? &vm->dropped : &vm->stored) += 8;
}

static void move_slot(struct vm *vm)
{
	static char *spare;
	char *old = vm->moving;

	if (!spare)
		spare = map(MOVING_PAGES * PAGE, MAP_PRIVATE);
	set_slot(vm, 2, MOVING, 0, old, 0);
	memcpy(spare, old, MOVING_PAGES * PAGE);
	set_slot(vm, 2, MOVING, MOVING_PAGES * PAGE, spare, 0);
	vm->moving = spare;
	spare = old;
	memset(old, 0xee, MOVING_PAGES * PAGE);
	vm->moved++;
}

static void fork_once(struct vm *vm)
{
	pid_t pid = fork();

	if (!pid)
		_exit(0);
	if (pid > 0)
		waitpid(pid, NULL, 0);
	vm->forks++;
}

static int run_guest(uint64_t pages, uint64_t seed, time_t end)
{
	struct vm vm = { 0 };
	struct mailbox *box;

	create(&vm, pages, seed);
	box = vm.box;
	for (unsigned long pause = 0; time(NULL) < end; ) {
		if (ioctl(vm.vcpu, KVM_RUN, 0)) {
			if (errno == EINTR)
				continue;
			skip("KVM_RUN");
		}
		if (vm.run->exit_reason != KVM_EXIT_IO) {
			/* A guest that can't even start is no fault of the memory. */
			errno = ENOTSUP;
			printf("exit %u after %lu pauses\n", vm.run->exit_reason, pause);
			if (!pause)
				skip("KVM_RUN");
			return 1;
		}
		if (vm.run->io.port == PORT_WRONG) {
			corrupt(&vm, "page %lu, version %u, word %lu: %lx instead of %lx", box->page, box->version[box->page],
				box->word, box->got, box->right);
			if (vm.wrong > 8)
				break;
			continue;
		}
		pause++;
		if (pause % 64 == 0)
			copy_dirty(&vm);
		else if (pause % 8 == 0)
			change(&vm, pause % 16 == 0);
		else if (pause % 256 == 1)
			move_slot(&vm);
		else if (pause % 256 == 129)
			fork_once(&vm);
		usleep(2000);
	}
	copy_dirty(&vm);
	printf("raw: %lu written, %lu checked, %lu wrong; %lu dirty logs with %lu pages, %lu dropped, %lu stored, %lu slots moved, %lu forks\n",
	       box->written, box->checked, vm.wrong, vm.logs, vm.dirty, vm.dropped, vm.stored, vm.moved, vm.forks);
	return vm.wrong || !box->written || !vm.dirty || !vm.moved;
}

int main(int argc, char **argv)
{
	time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 10);
	uint64_t pages = (argc > 2 ? strtoul(argv[2], NULL, 0) : 32) * MIB / PAGE;
	int result = 0, status;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (pages < 64 || pages > MOST_PAGES)
		return 2;
	for (int k = 0; k < 2; k++) {
		if (!fork())
			return run_guest(pages, 0x9e3779b97f4a7c15ULL * (k + 1), end);
	}
	while (wait(&status) > 0) {
		if (!WIFEXITED(status))
			result = 1;
		else if (WEXITSTATUS(status) > result)
			result = WEXITSTATUS(status);
	}
	return result;
}
