// The contents of the witnesses' pages, on Xen and on Linux: words made from a seed. The seed is either the same for
// this page in every witness, or the witness's own.

typedef unsigned int u32;

#define PAGE 4096u
#define WORDS (PAGE / 4)

static u32 same, zero, own, seed;

static u32 next(u32 *state) {
  u32 x = *state;
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return *state = x;
}

// The contents that a page begins with; 0 means zeros.
static u32 content(u32 page) {
  u32 base = page < same ? 0x9e3779b9u : page < same + zero ? 0 : seed * 0x85ebca6bu;
  return base ? (base ^ (page * 0xc2b2ae35u)) | 1 : 0;
}

static void fill_page(u32 *words, u32 page) {
  u32 state = content(page), i;
  for (i = 0; i < WORDS; i++)
    words[i] = state ? next(&state) : 0;
}
