// The rows of a call of an any-subset model: decided tokens that are not in the cache, draft tokens, and queries, one for
// each distribution that the call computes (methods/assd/network.py).
#include <stdint.h>

typedef struct {
  const int64_t *places, *place_tokens;  // [unread]: positions and tokens of the decided ones
  const int64_t *tokens, *parents;       // [nodes]: draft tokens, then nodes without tokens
  const int64_t *open;                   // positions of the open holes, in turn
  int64_t unread, given, drafts, nodes, mask;  // the first `given` decided tokens see each other; queries read `mask`
  int64_t *row_tokens, *positions;       // [rows], written: contents, then queries
  uint8_t *visible;                      // [rows, rows], written
  int64_t *outputs;                      // [1 + nodes], written: the query of the decided tokens and of each node
} HoleRows;

#define MOST_HOLE_NODES 64

// The number of queries; −1 for more nodes than there is room for. A query depends on the draft tokens up to a node, and is
// for the hole of a depth; the first one of a chain has the distribution of the node before it, and shares its row.
int64_t saltus_hole_rows(const HoleRows *a) {
  int64_t depths[MOST_HOLE_NODES], given_by[MOST_HOLE_NODES + 1], holes[MOST_HOLE_NODES + 1], queries = 1;
  int64_t last[MOST_HOLE_NODES];  // the last draft token on the path to each node, itself included
  if (a->nodes > MOST_HOLE_NODES) return -1;
  given_by[0] = -1, holes[0] = 0, a->outputs[0] = 0;
  for (int64_t n = 0; n < a->nodes; n++) {
    const int64_t parent = a->parents[n];
    depths[n] = parent < 0 ? 0 : depths[parent] + 1;
    last[n] = n < a->drafts ? n : parent < 0 ? -1 : last[parent];
    const int64_t hole = depths[n] + (n < a->drafts);
    int64_t query = 0;
    while (query < queries && (given_by[query] != last[n] || holes[query] != hole)) query++;
    if (query == queries) given_by[queries] = last[n], holes[queries++] = hole;
    a->outputs[n + 1] = query;
  }
  const int64_t contents = a->unread + a->drafts, rows = contents + queries;
  for (int64_t r = 0; r < rows; r++) {
    uint8_t *row = a->visible + r * rows;
    const int64_t node = r < a->unread ? -1 : r < contents ? a->parents[r - a->unread] : given_by[r - contents];
    for (int64_t c = 0; c < rows; c++) row[c] = c < a->unread && (c <= r || (r < a->given && c < a->given));
    for (int64_t c = a->unread; c < contents && node >= 0; c++) row[c] = a->visible[(a->unread + node) * rows + c];
    row[r] = 1;
    if (r < a->unread) a->row_tokens[r] = a->place_tokens[r], a->positions[r] = a->places[r];
    else if (r < contents)
      a->row_tokens[r] = a->tokens[r - a->unread], a->positions[r] = a->open[depths[r - a->unread]];
    else a->row_tokens[r] = a->mask, a->positions[r] = a->open[holes[r - contents]];
  }
  return queries;
}
