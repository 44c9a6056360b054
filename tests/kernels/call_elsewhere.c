// Make one call of a decoder that another process has written down, on another processor: regions of its memory, whose
// pointers are changed to where the regions lie here. Prints the regions that are asked for.
#include "kernels.h"
#include <stdio.h>

int decode_bf16(const Decoder *a);

typedef struct {
  int64_t address, size, has_pointers, is_printed;
  char *here;
} Region;

static int64_t number(FILE *file) {
  int64_t x;
  if (fread(&x, sizeof x, 1, file) != 1) exit(2);
  return x;
}

int main(int count, char **arguments) {
  FILE *file = fopen(arguments[count - 1], "rb");
  const int64_t entry = number(file), regions = number(file);
  Region *region = calloc(regions, sizeof *region);
  for (int64_t i = 0; i < regions; i++) {
    Region *r = region + i;
    r->address = number(file), r->size = number(file), r->has_pointers = number(file), r->is_printed = number(file);
    r->here = aligned_alloc(64, PAD(r->size + 8192, 64));
    if (fread(r->here, 1, r->size, file) != (size_t)r->size) return 2;
  }
  const Decoder *decoder = NULL;
  for (int64_t i = 0; i < regions; i++) {
    if (region[i].address == entry) decoder = (Decoder *)region[i].here;
    for (int64_t at = 0; region[i].has_pointers && at + 8 <= region[i].size; at += 8) {
      int64_t *word = (int64_t *)(region[i].here + at);
      for (int64_t j = 0; j < regions; j++)
        if (*word >= region[j].address && *word < region[j].address + region[j].size) {
          *word = (int64_t)(region[j].here + (*word - region[j].address));
          break;
        }
    }
  }
  saltus_threads(2);
  if (!decoder || decode_bf16(decoder)) return 3;
  for (int64_t i = 0; i < regions; i++)
    if (region[i].is_printed) fwrite(region[i].here, 1, region[i].size, stdout);
  return 0;
}
