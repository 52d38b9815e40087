// SPDX-License-Identifier: GPL-2.0
/*
 * Loads modules that must be refused, each once: with ENODEV, and one line in the kernel's log. usage: refused_test FILE..., as root.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { printf("not ok: %s, line %d: %s\n", file, __LINE__, #what); exit(1); } } while (0)
#define CLEAR_LOG	5
#define READ_LOG	3

static void check(const char *file)
{
	static char log[1 << 18];
	int fd = open(file, O_RDONLY), len, lines = 0;

	CHECK(fd >= 0 && !klogctl(CLEAR_LOG, NULL, 0));
	CHECK(syscall(SYS_finit_module, fd, "", 0) == -1 && errno == ENODEV);
	close(fd);
	len = klogctl(READ_LOG, log, sizeof(log) - 1);
	CHECK(len > 0);
	log[len] = 0;
	for (char *line = strtok(log, "\n"); line; line = strtok(NULL, "\n")) {
		/* The kernel says once that it is tainted */
		if (!strstr(line, "ksm_request") || strstr(line, "taint"))
			continue;
		printf("%s\n", line);
		CHECK(strstr(line, "ksm_request: refused: Linux "));
		lines++;
	}
	CHECK(lines == 1);
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		check(argv[i]);
	printf("# PASSED: refused_test\n");
	return argc < 2;
}
