// Shows what the tests need to know about guests, independently of pagefold: the hypervisor's facts about shared
// frames, and the witnesses' mailboxes.
// usage: inspect shared DOMAIN FIRST COUNT      how many of these guest frames are shared, and how many frames hold them
//        inspect mail DOMAIN                    the witness's mailbox
//        inspect command DOMAIN NUMBER          orders a witness: 0 rest, 1 check, 2 write and check, 3 give memory back and check
//        inspect spoil DOMAIN FRAME FRAME       shares two pages without comparing them, which a witness must find
//        inspect totals                         saved pages, frames that hold them, free memory
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xenctrl.h>
#include <xenforeignmemory.h>

// xen/src/library.rs declares the same structures.
_Static_assert(sizeof(xc_domaininfo_t) == 112, "the layout of a domain's figures");
_Static_assert(sizeof(xc_physinfo_t) == 112, "the layout of the machine's figures");

#define MAILBOX 8
#define MAGIC 0x70676664u

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static volatile uint32_t *mailbox(uint32_t domain, int rights, xenforeignmemory_handle **handle) {
  xen_pfn_t page = MAILBOX;
  int error = 0;
  void *at;
  *handle = xenforeignmemory_open(NULL, 0);
  if (!*handle)
    fail("xenforeignmemory_open");
  at = xenforeignmemory_map(*handle, domain, rights, 1, &page, &error);
  if (!at || error)
    fail("xenforeignmemory_map");
  return at;
}

int main(int count, char **args) {
  xc_interface *xen = xc_interface_open(NULL, NULL, 0);
  uint32_t domain = count > 2 ? (uint32_t)atoi(args[2]) : 0;
  xenforeignmemory_handle *handle;
  volatile uint32_t *mail;
  if (!xen)
    fail("xc_interface_open");
  if (count == 5 && !strcmp(args[1], "shared")) {
    unsigned long first = strtoul(args[3], NULL, 0), pages = strtoul(args[4], NULL, 0), page;
    unsigned long shared = 0, alone = 0;
    double frames = 0;
    for (page = first; page < first + pages; page++) {
      int references = xc_memshr_debug_gfn(xen, domain, page);
      if (references > 1) {
        shared++;
        frames += 1.0 / references;
      } else if (references == 1)
        alone++;
    }
    printf("shared %lu frames %.2f nominated %lu\n", shared, frames, alone);
  } else if (count == 3 && !strcmp(args[1], "mail")) {
    mail = mailbox(domain, PROT_READ, &handle);
    if (mail[0] != MAGIC)
      return 2;
    printf("state %u rounds %u pages %u bad %u written %u first-bad %u renewed %u\n", mail[7], mail[2], mail[3], mail[4], mail[5], mail[6],
           mail[8]);
  } else if (count == 4 && !strcmp(args[1], "command")) {
    mail = mailbox(domain, PROT_READ | PROT_WRITE, &handle);
    mail[1] = (uint32_t)atoi(args[3]);
  } else if (count == 5 && !strcmp(args[1], "spoil")) {
    unsigned long source = strtoul(args[3], NULL, 0), client = strtoul(args[4], NULL, 0);
    uint64_t handles[2];
    if (xc_memshr_control(xen, domain, 1) || xc_memshr_nominate_gfn(xen, domain, source, &handles[0]) ||
        xc_memshr_nominate_gfn(xen, domain, client, &handles[1]) ||
        xc_memshr_share_gfns(xen, domain, source, handles[0], domain, client, handles[1]))
      fail("cannot share");
  } else if (count == 2 && !strcmp(args[1], "totals")) {
    xc_physinfo_t info;
    memset(&info, 0, sizeof info);
    if (xc_physinfo(xen, &info))
      fail("xc_physinfo");
    printf("saved %ld frames %ld free %" PRIu64 "\n", xc_sharing_freed_pages(xen), xc_sharing_used_frames(xen), info.free_pages);
  } else {
    fprintf(stderr, "usage: inspect shared|mail|command|spoil|totals ...\n");
    return 2;
  }
  return 0;
}
