// A guest that knows the contents of its memory. It fills pages, checks all of them again and again, and writes to some
// at random. So it notices if a page was shared wrongly or has lost a write. PVH, 32 bits, no paging, no interrupts, no
// devices.
//
// Command line: seed=N (for the contents that only this guest holds); same=N, zero=N, own=N (the number of pages that
// every witness holds, of pages of zeros, and of pages that no other guest holds). The pages begin at FIRST. Dom0 maps
// the mailbox, which has a command and the results.

#include "contents.h"

typedef unsigned long long u64;

#define FIRST 0x400000u
#define MAGIC 0x70676664u

// Page 8, which no loader uses.
struct mailbox {
  volatile u32 magic, command, rounds, pages, bad, written, first_bad, state, renewed;
};
#define MAILBOX ((struct mailbox *)0x8000)

enum { REST, CHECK, WRITE, BALLOON };

struct start_info {
  u32 magic, version, flags, nr_modules;
  u64 modules, cmdline;
};

static unsigned char hypercalls[PAGE] __attribute__((aligned(4096)));
// How word 0 of each page has been changed; 0 means that the page has the contents it began with.
static unsigned char versions[1 << 20];

static u32 number(const char *line, const char *name) {
  for (; *line; line++) {
    u32 i = 0, value = 0;
    while (name[i] && line[i] == name[i])
      i++;
    if (name[i] || line[i] != '=')
      continue;
    for (line += i + 1; *line >= '0' && *line <= '9'; line++)
      value = value * 10 + (u32)(*line - '0');
    return value;
  }
  return 0;
}

static void cpuid(u32 leaf, u32 out[4]) {
  __asm__ volatile("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(0));
}

// Makes the hypervisor fill in our hypercall page.
static void find_hypervisor(void) {
  u32 base, regs[4];
  for (base = 0x40000000; base < 0x40010000; base += 0x100) {
    cpuid(base, regs);
    if (regs[1] == 0x566e6558) // XenV
      break;
  }
  cpuid(base + 2, regs);
  __asm__ volatile("wrmsr" : : "c"(regs[1]), "a"((u32)hypercalls), "d"(0) : "memory");
}

static u32 hypercall(u32 number, u32 first, void *second) {
  u32 result;
  void *call = hypercalls + number * 32;
  __asm__ volatile("call *%3" : "=a"(result), "+b"(first), "+c"(second) : "r"(call) : "memory");
  return result;
}

// sched_op(yield).
static void yield(void) { hypercall(29, 0, 0); }

// The hypervisor keeps the time in this page of the guest.
#define SHARED 9
struct time {
  volatile u32 version, unused;
  volatile u64 tsc, ns;
  volatile u32 multiplier;
  volatile signed char shift;
};
#define TIME ((struct time *)(SHARED * PAGE + 32))

static void map_time(void) {
  struct {
    unsigned short domain, size;
    u32 space, index, frame;
  } where = {0x7ff0, 0, 0, 0, SHARED};
  hypercall(12, 7, &where); // memory_op(add_to_physmap), shared_info of DOMID_SELF
}

// Sleeps for some milliseconds, so that a resting guest uses no CPU time: sched_op(poll), for no event.
static void sleep(void) {
  struct {
    u32 ports, number;
    u64 until;
  } poll = {0, 0, 0};
  u32 low, high, version;
  u64 ns;
  do {
    version = TIME->version;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    u64 ticks = (((u64)high << 32) | low) - TIME->tsc;
    ticks = TIME->shift < 0 ? ticks >> -TIME->shift : ticks << TIME->shift;
    ns = TIME->ns + (((ticks & 0xffffffffu) * TIME->multiplier) >> 32) + (ticks >> 32) * TIME->multiplier;
  } while ((version & 1) || version != TIME->version);
  poll.until = ns + 20000000;
  hypercall(29, 3, &poll);
}

static u32 *at(u32 page) { return (u32 *)(FIRST + page * PAGE); }

static void fill(u32 page) { fill_page(at(page), page); }

static int is_right(u32 page) {
  u32 state = content(page), i, differing = 0;
  volatile u32 *words = at(page);
  differing = words[0] ^ (state ? next(&state) : 0) ^ versions[page];
  for (i = 1; i < WORDS; i++)
    differing |= words[i] ^ (state ? next(&state) : 0);
  return !differing;
}

// Gives a page back to the hypervisor, gets another in its place, and fills that with the first contents.
static void renew(u32 page) {
  u32 frame = (FIRST >> 12) + page;
  struct {
    u32 *frames, number, order, flags;
    unsigned short domain;
  } one = {&frame, 1, 0, 0, 0x7ff0};
  hypercall(12, 1, &one); // memory_op(decrease_reservation)
  yield();
  while (hypercall(12, 6, &one) != 1) // memory_op(populate_physmap)
    yield();
  fill(page);
  versions[page] = 0;
}

void main(struct start_info *info) {
  struct mailbox *mail = MAILBOX;
  const char *line = (const char *)(u32)info->cmdline;
  u32 pages, page, random;
  seed = number(line, "seed");
  same = number(line, "same");
  zero = number(line, "zero");
  own = number(line, "own");
  pages = same + zero + own;
  random = seed * 2654435761u | 1;
  find_hypervisor();
  map_time();
  for (page = 0; page < pages; page++)
    fill(page);
  mail->pages = pages;
  mail->magic = MAGIC;
  for (;;) {
    u32 command = mail->command;
    mail->state = command;
    if (command == REST) {
      sleep();
      continue;
    }
    for (page = 0; page < pages && mail->command == command; page++) {
      if (command == WRITE) {
        // We change a page and change it back, so that it becomes equal again to the same page of other witnesses.
        u32 other = next(&random) % pages, version = next(&random) & 1;
        volatile u32 *word = at(other);
        *word = *word ^ versions[other] ^ version;
        versions[other] = (unsigned char)version;
        mail->written++;
      }
      if (command == BALLOON) {
        renew(next(&random) % pages);
        mail->renewed++;
      }
      if (!is_right(page)) {
        if (!mail->bad++)
          mail->first_bad = page;
      }
      if (page % 64 == 0)
        yield();
    }
    if (page == pages)
      mail->rounds++;
  }
}

// The entry: a stack, and start_info, which the loader leaves in ebx.
__asm__(".pushsection .note.Xen, \"a\", @note\n"
        ".align 4\n"
        ".long 4, 4, 18\n" // XEN_ELFNOTE_PHYS32_ENTRY
        ".asciz \"Xen\"\n"
        ".long entry\n"
        ".popsection\n"
        ".globl entry\n"
        "entry: cld\n"
        "mov $stack_end, %esp\n"
        "push %ebx\n"
        "push $0\n"
        "jmp main\n"
        ".pushsection .bss\n"
        ".align 16\n"
        ".skip 8192\n"
        "stack_end:\n"
        ".popsection\n");
