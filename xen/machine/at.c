// Stops a program that shares memory right after one of its steps, runs a shell command meanwhile, and lets the program
// go on.
// usage: at STEP NUMBER ACTION PROGRAM [ARGUMENT...]
// We count the steps of each kind separately, from the first nomination on:
//        nominate, share    after this call to the hypervisor
//        map, unmap         after guests' pages have been mapped, or unmapped
//        compare            before pages are unmapped, when we have looked at them
//        read               like map, but counted from the start, when nothing is nominated yet
// ACTION finds the program's pid in $PID. We exit with the program's exit code, with 128 plus the signal's number if a
// signal has killed it, or with 125 if the step did not come.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#define __XEN_TOOLS__
#include <xenctrl.h>
#include <xen/memory.h>
#include <xen/sys/privcmd.h>
#include <linux/ptrace.h>

static pid_t program;

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static void read_memory(uint64_t from, void *to, size_t size) {
  struct iovec local = {to, size}, remote = {(void *)from, size};
  if (process_vm_readv(program, &local, 1, &remote, 1, 0) != (ssize_t)size)
    fail("process_vm_readv");
}

// Returns which step a call is, or NULL if it is none.
static const char *step_of(const struct ptrace_syscall_info *call, uint64_t *mapping) {
  const __u64 *args = call->entry.args;
  if (call->entry.nr == SYS_munmap)
    return args[0] == *mapping ? "unmap" : NULL;
  if (call->entry.nr != SYS_ioctl)
    return NULL;
  if (args[1] == IOCTL_PRIVCMD_MMAPBATCH_V2) {
    privcmd_mmapbatch_v2_t batch;
    read_memory(args[2], &batch, sizeof batch);
    *mapping = batch.addr;
    return "map";
  }
  if (args[1] == IOCTL_PRIVCMD_HYPERCALL) {
    privcmd_hypercall_t hypercall;
    multicall_entry_t memory;
    uint8_t operation;
    // The library makes each memory call as a multicall of one entry, because that returns a result.
    read_memory(args[2], &hypercall, sizeof hypercall);
    if (hypercall.op != __HYPERVISOR_multicall)
      return NULL;
    read_memory(hypercall.arg[0], &memory, sizeof memory);
    if (memory.op != __HYPERVISOR_memory_op || memory.args[0] != XENMEM_sharing_op)
      return NULL;
    read_memory(memory.args[1], &operation, sizeof operation);
    return operation == XENMEM_sharing_op_nominate_gfn ? "nominate" : operation == XENMEM_sharing_op_share ? "share" : NULL;
  }
  return NULL;
}

int main(int count, char **args) {
  int status, left = count > 2 ? atoi(args[2]) : 0, signal = 0;
  uint64_t mapping = 0;
  const char *step = NULL, *wanted = count > 1 ? args[1] : "";
  int has_begun = !strcmp(wanted, "read");
  char number[16];
  if (count < 5 || left < 1) {
    fprintf(stderr, "usage: at nominate|map|compare|unmap|share|read NUMBER ACTION PROGRAM [ARGUMENT...]\n");
    return 2;
  }
  if (has_begun)
    wanted = "map";
  program = fork();
  if (!program) {
    ptrace(PTRACE_TRACEME, 0, 0, 0);
    execvp(args[4], args + 4);
    fail(args[4]);
  }
  snprintf(number, sizeof number, "%d", program);
  setenv("PID", number, 1);
  if (waitpid(program, &status, 0) != program || !WIFSTOPPED(status) ||
      ptrace(PTRACE_SETOPTIONS, program, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL))
    fail("cannot trace");
  // We trace only its main thread: the other threads make none of these calls. Somebody may kill the program at any
  // time.
  while (left > 0) {
    struct ptrace_syscall_info call;
    ptrace(PTRACE_SYSCALL, program, 0, signal);
    if (waitpid(program, &status, 0) != program || !WIFSTOPPED(status))
      return 125;
    signal = WSTOPSIG(status) == (SIGTRAP | 0x80) ? 0 : WSTOPSIG(status);
    if (signal || ptrace(PTRACE_GET_SYSCALL_INFO, program, sizeof call, &call) <= 0)
      continue;
    if (call.op == PTRACE_SYSCALL_INFO_ENTRY) {
      step = step_of(&call, &mapping);
      has_begun |= step && !strcmp(step, "nominate");
      left -= has_begun && step && !strcmp(step, "unmap") && !strcmp(wanted, "compare");
    } else if (has_begun && step) {
      left -= !strcmp(step, wanted);
      // The kernel may use the address for another mapping.
      if (!strcmp(step, "unmap"))
        mapping = 0;
    }
  }
  if (system(args[3]))
    fprintf(stderr, "%s: failed\n", args[3]);
  ptrace(PTRACE_DETACH, program, 0, 0);
  if (waitpid(program, &status, 0) != program)
    fail("waitpid");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
