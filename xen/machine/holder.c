// A process on Linux that holds the same contents as a witness on Xen (witness.c), and sleeps.
// usage: holder SEED SAME ZERO OWN
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "contents.h"

int main(int count, char **args) {
  u32 pages, page;
  char *at;
  if (count != 5)
    return 2;
  seed = (u32)atoi(args[1]);
  same = (u32)atoi(args[2]);
  zero = (u32)atoi(args[3]);
  own = (u32)atoi(args[4]);
  pages = same + zero + own;
  at = mmap(NULL, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED)
    return 1;
  // Use 4 KiB pages, as dom0 sees the pages of guests.
  madvise(at, (size_t)pages * PAGE, MADV_NOHUGEPAGE);
  for (page = 0; page < pages; page++)
    fill_page((u32 *)(void *)(at + (size_t)page * PAGE), page);
  puts("ready");
  fflush(stdout);
  for (;;)
    pause();
}
