// SPDX-License-Identifier: GPL-2.0
/*
 * Unloads the module while pages are merged, and checks every byte after writing, after a scan by ksmd, after loading it again and
 * after run 2; that nothing is left of processes that exited while it was away; and that merged pages without records don't keep it
 * from being unloaded. usage: unload_test ksm_request.ko, as root.
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
#include <unistd.h>
#include <linux/ksm.h>

#define PAGE	4096UL
#define N	2000UL

#define CHECK(what) do { if (!(what)) { printf("not ok: line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static char *a, *b;
static unsigned char written[N];

static long knob(const char *name, const char *value)
{
	char path[128], buf[64] = "";
	int fd;

	snprintf(path, sizeof(path), "/sys/kernel/mm/ksm/%s", name);
	fd = open(path, value ? O_WRONLY : O_RDONLY);
	CHECK(fd >= 0 && (value ? write(fd, value, strlen(value)) : read(fd, buf, sizeof(buf) - 1)) > 0);
	close(fd);
	return atol(buf);
}

static void fill(char *p, uint64_t seed)
{
	for (size_t i = 0; i < PAGE / 8; i++)
		((uint64_t *)p)[i] = (seed + 1) * 0x9e3779b97f4a7c15ULL + i * i;
}

static void check(void)
{
	char want[PAGE];

	for (size_t i = 0; i < N; i++) {
		fill(want, i);
		CHECK(!memcmp(a + i * PAGE, want, PAGE));
		if (written[i])
			fill(want, i + written[i] * N);
		CHECK(!memcmp(b + i * PAGE, want, PAGE));
	}
}

static void write_some(unsigned int which, unsigned int what)
{
	for (size_t i = 0; i < N; i++) {
		if (i % 7 != which)
			continue;
		written[i] = what;
		fill(b + i * PAGE, i + what * N);
	}
}

static unsigned long merge(void)
{
	struct ksm_merge_range r = { .keep_addr = (uintptr_t)a, .take_addr = (uintptr_t)b, .nr_pages = N };
	struct ksm_merge m = { .version = KSM_ABI_VERSION, .range_size = sizeof(r), .ranges = (uintptr_t)&r, .nr_ranges = 1 };
	int dev = open("/dev/ksm", O_RDWR), own = syscall(SYS_pidfd_open, getpid(), 0);

	r.keep_pidfd = r.take_pidfd = own;
	CHECK(dev >= 0 && ioctl(dev, KSM_IOC_MERGE, &m) == 1 && !r.status && r.nr_done == N);
	close(dev);
	close(own);
	return r.nr_merged;
}

static void load(const char *file)
{
	int fd = open(file, O_RDONLY);

	CHECK(fd >= 0 && !syscall(SYS_finit_module, fd, "", 0));
	close(fd);
}

static void unload(void)
{
	CHECK(!syscall(SYS_delete_module, "ksm_request", O_NONBLOCK));
	CHECK(access("/dev/ksm", F_OK));
}

static void scan(void)
{
	long scans = knob("full_scans", NULL);

	knob("run", "1");
	while (knob("full_scans", NULL) < scans + 3)
		usleep(1000);
	knob("run", "0");
}

/* Returns a process with many merged pages that have no records any more: its parent has merged others, and then exited. */
static pid_t orphan(void)
{
	pid_t parent, child;
	int p[2], status;

	CHECK(!pipe(p) && !prctl(PR_SET_CHILD_SUBREAPER, 1));
	parent = fork();
	if (!parent) {
		for (size_t i = 0; i < 2 * N; i++) {
			fill(a + i % N * PAGE, i);
			fill(b + i % N * PAGE, i);
			if (i % N < N - 1)
				continue;
			CHECK(merge() == N);
			if (i > N)
				break;
			child = fork();
			if (!child)
				pause();
			CHECK(write(p[1], &child, sizeof(child)) == sizeof(child));
		}
		_exit(0);
	}
	CHECK(read(p[0], &child, sizeof(child)) == sizeof(child));
	CHECK(waitpid(parent, &status, 0) == parent && !status);
	/* Those of the parent go */
	usleep(500000);
	return child;
}

int main(int argc, char **argv)
{
	pid_t child;
	int status;

	CHECK(argc == 2);
	load(argv[1]);
	knob("pages_to_scan", "1000000");
	/* The first half of this is with a tree for each node */
	knob("merge_across_nodes", "0");
	a = mmap(NULL, N * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	b = mmap(NULL, N * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (size_t i = 0; i < N; i++) {
		fill(a + i * PAGE, i);
		fill(b + i * PAGE, i);
	}
	CHECK(merge() == N);
	/* One that exits, and one that only the records of the parent keep, while the module is away */
	child = fork();
	if (!child) {
		CHECK(!munmap(a, N * PAGE / 2));
		_exit(0);
	}
	unload();
	CHECK(waitpid(child, &status, 0) == child && !status);
	check();
	write_some(1, 1);
	check();
	scan();
	check();
	CHECK(knob("pages_sharing", NULL) >= (long)(N * 6 / 7));
	write_some(2, 1);
	load(argv[1]);
	write_some(3, 1);
	check();
	merge();
	check();
	/* An exit, beside ksmd */
	knob("run", "1");
	child = fork();
	if (!child) {
		fill(a, N * 100);
		unload();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status);
	check();
	knob("run", "2");
	CHECK(knob("pages_shared", NULL) == 0);
	check();
	knob("run", "0");
	knob("merge_across_nodes", "1");
	/* Many times, with records of processes that are just exiting */
	for (int i = 0; i < 20; i++) {
		load(argv[1]);
		child = fork();
		if (!child) {
			written[0] = 0;
			for (size_t k = 0; k < N; k++) {
				fill(a + k * PAGE, k + i);
				fill(b + k * PAGE, k + i);
			}
			CHECK(merge() == N);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && !status);
		usleep(i * 2500);
		unload();
	}
	load(argv[1]);
	check();
	for (int i = 0; i < 100 && knob("pages_shared", NULL); i++)
		usleep(20000);
	CHECK(knob("pages_shared", NULL) == 0);
	child = orphan();
	unload();
	CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
	printf("# PASSED: unload_test\n");
	return 0;
}
