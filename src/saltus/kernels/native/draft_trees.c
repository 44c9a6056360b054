// What stands around a call in C, since a call's weights leave nothing of Python in the caches: drafts from repeats
// (methods/lookup.py), the tree of all drafts (core/tree.py), how much of it pays (core/control), and what its rows see.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define END_OF_REFERENCE -1
#define CANDIDATES 4

typedef struct {                 // SLOT of methods/shared/ngram_model.py
  uint64_t key;                  // 0: empty
  int32_t tokens[CANDIDATES];    // the likeliest first, −1 after the last
  float chances[CANDIDATES];
} NgramSlot;

typedef struct {
  const int64_t *text;         // [length]
  const int64_t *chains[2];    // by n-gram size: of each position where the n-gram before it stood before, −1: nowhere
  int64_t latest[2];           // where the last n-grams of the text stood last, −1: nowhere
  int64_t *places, *sizes;     // [room]: repeats, see `Repeat`; the first `repeats` are given, others are found in the chains
  int64_t length, repeats, room, max_matches, max_size;
  int64_t sure_repeat, max_sure_matches, most, max_depth;
  double least;                // path probability
  int64_t *tokens, *parents;   // [most]: the nodes, parents first
  double *chances;             // [most]
  const NgramSlot *ngrams;     // [slots], a power of two; none: 0 slots
  int64_t slots, order;        // order: tokens of the longest contexts
} Repeats;

// `longer_key` of methods/shared/ngram_model.py.
static uint64_t longer_key(uint64_t key, int64_t token) {
  uint64_t mixed = (key ^ (uint64_t)(token + 1)) * 0x9E3779B97F4A7C15u;
  mixed = (mixed ^ mixed >> 29) * 0xC2B2AE3D27D4EB4Fu;
  mixed ^= mixed >> 32;
  return mixed ? mixed : 1;
}

// What the n-gram model predicts after the text and a path: the number of tokens.
static int64_t predict(const Repeats *a, const int64_t *path, int64_t depth, int64_t *tokens, double *chances) {
  const int64_t last = a->slots - 1;
  const NgramSlot *found = NULL;
  int64_t count = 0;
  uint64_t key = 0;
  for (int64_t i = 1; i <= a->order && i <= depth + a->length; i++) {
    const int64_t token = i <= depth ? path[depth - i] : a->text[a->length - (i - depth)];
    if (token < 0) break;
    key = longer_key(key, token);
    int64_t slot = (int64_t)(key & (uint64_t)last);
    while (a->ngrams[slot].key != key && a->ngrams[slot].key) slot = (slot + 1) & last;
    if (!a->ngrams[slot].key) break;
    found = a->ngrams + slot;
  }
  for (; found && count < CANDIDATES && found->tokens[count] >= 0; count++)
    tokens[count] = found->tokens[count], chances[count] = (double)found->chances[count];
  return count;
}

static void find_repeats(Repeats *a) {
  int64_t next[2] = {a->latest[0], a->latest[1]}, left[2] = {a->max_matches, a->max_matches};
  while (a->repeats < a->room) {
    for (int i = 0; i < 2; i++) next[i] = left[i] ? next[i] : -1;
    const int64_t at = next[0] > next[1] ? next[0] : next[1];
    if (at < 0) return;
    for (int i = 0; i < 2; i++)
      if (next[i] == at) next[i] = a->chains[i][at], left[i]--;
    const int64_t most = at < a->max_size ? at : a->max_size;
    int64_t size = 0;
    while (size < most && a->text[at - 1 - size] == a->text[a->length - 1 - size]) size++;
    a->places[a->repeats] = at, a->sizes[a->repeats++] = size;
  }
}

typedef struct {
  double reached, chance;
  int64_t number, parent, token, depth, first, count;  // first, count: of its repeats
} RepeatPath;

// `votes` of methods/lookup.py for the tokens after some repeats: the different tokens, `different` known ones first and the
// others in the order in which they come first, and their probabilities.
static int64_t vote(const int64_t *ahead, const int64_t *sizes, int64_t count, int64_t different, int64_t *tokens,
                    double *chances, int64_t *of, double *counts, int64_t *order) {
  int64_t least = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t j = 0;
    while (j < different && tokens[j] != ahead[i]) j++;
    if (j == different) tokens[different] = ahead[i], chances[different++] = 0;
    of[i] = j;
  }
  for (;;) {
    int64_t above = INT64_MAX, seen = 0;
    for (int64_t i = 0; i < count; i++) above = sizes[i] > least && sizes[i] < above ? sizes[i] : above;
    if (above == INT64_MAX) return different;
    least = above;
    double weight = 1, total = 0, discounted = 0;
    for (int64_t j = 0; j < different; j++) counts[j] = 0;
    for (int64_t i = 0; i < count; i++)
      if (sizes[i] >= least) {
        if (!counts[of[i]]) order[seen++] = of[i];
        counts[of[i]] = counts[of[i]] + weight;
        total += weight;
        weight *= 0.9;
      }
    const double strength = 2.25 * pow((double)least, -1.63), cap = 40 / (double)(least * least);
    const double discount = cap < 0.31 ? cap : 0.31;
    for (int64_t k = 0; k < seen; k++) discounted += counts[order[k]] < discount ? counts[order[k]] : discount;
    const double shorter = strength + discounted;
    for (int64_t j = 0; j < different; j++) {
      const double taken = counts[j] < discount ? counts[j] : discount;
      chances[j] = (counts[j] - taken + shorter * chances[j]) / (total + strength);
    }
  }
}

// The number of nodes; −1 without memory. `branches` of methods/lookup.py, with their repeats where there are chains.
int64_t saltus_repeat_paths(Repeats *a) {
  if (a->chains[0]) find_repeats(a);
  int64_t sure = 0, repeats = a->repeats;
  for (int64_t i = 0; i < repeats; i++) sure += a->sizes[i] >= a->sure_repeat;
  const int64_t most_tokens = repeats + (a->slots ? CANDIDATES : 0);  // after a path
  const int64_t steps = a->most + 1, numbers = (steps + 1) * most_tokens + 1;
  char *room = malloc(numbers * (2 * sizeof(int64_t) + sizeof(RepeatPath)) + most_tokens * 8 * sizeof(int64_t) +
                      a->max_depth * sizeof(int64_t));
  if (!room) return -1;
  RepeatPath *open = (RepeatPath *)room;
  int64_t *places = (int64_t *)(open + numbers), *sizes = places + numbers, *alive = sizes + numbers;
  int64_t *alive_sizes = alive + most_tokens, *ahead = alive_sizes + most_tokens, *tokens = ahead + most_tokens;
  int64_t *of = tokens + most_tokens, *order = of + most_tokens, *path = order + most_tokens;
  double *chances = (double *)(path + a->max_depth), *counts = chances + most_tokens;
  int64_t used = 0, made = 0, pushed = 0, waiting = 1, kept = 0;
  for (int64_t i = 0; i < repeats; i++)
    if (!sure || (a->sizes[i] >= a->sure_repeat && kept++ < a->max_sure_matches))
      places[used] = a->places[i], sizes[used++] = a->sizes[i];
  open[0] = (RepeatPath){.reached = 1, .parent = -1, .count = used};
  for (int64_t step = 0; step < steps && waiting; step++) {
    int64_t best = 0, node = -1;
    for (int64_t i = 1; i < waiting; i++)
      if (open[i].reached > open[best].reached || (open[i].reached == open[best].reached && open[i].number < open[best].number))
        best = i;
    const RepeatPath now = open[best];
    open[best] = open[--waiting];
    if (step) {
      node = made++;
      a->tokens[node] = now.token, a->parents[node] = now.parent, a->chances[node] = now.chance;
    }
    if (now.depth == a->max_depth) continue;
    for (int64_t i = now.depth, at = node; i-- > 0; at = a->parents[at]) path[i] = a->tokens[at];
    int64_t count = 0;
    for (int64_t i = now.first; i < now.first + now.count; i++) {
      const int64_t token = places[i] < a->length ? a->text[places[i]] : path[places[i] - a->length];
      if (token == END_OF_REFERENCE) continue;
      alive[count] = places[i], alive_sizes[count] = sizes[i], ahead[count++] = token;
    }
    const int64_t known = a->slots && !sure ? predict(a, path, now.depth, tokens, chances) : 0;
    const int64_t different = vote(ahead, alive_sizes, count, known, tokens, chances, of, counts, order);
    for (int64_t j = 0; j < different; j++) {
      const double reached = now.reached * chances[j];
      if (reached < a->least) continue;
      const int64_t first = used;
      for (int64_t i = 0; i < count; i++)
        if (of[i] == j) places[used] = alive[i] + 1, sizes[used++] = alive_sizes[i] + 1;
      open[waiting++] = (RepeatPath){.reached = reached, .chance = chances[j], .number = ++pushed, .parent = node,
                                     .token = tokens[j], .depth = now.depth + 1, .first = first, .count = used - first};
    }
  }
  free(room);
  return made;
}

typedef struct {
  const int64_t *tokens, *parents;  // [count]: a drafter's nodes, parents first
  const double *chances;            // [count], as the drafter states them
  int64_t count, source;
} DraftedNodes;

typedef struct {
  const DraftedNodes *drafted;
  const double *records;  // [sources, 3, 2]: accepted and expected drafts by third of the scale; NULL: chances are as stated
  double prior, least;
  int64_t num_drafted, most, max_depth;
  int64_t *tokens, *parents, *sources;  // [most]
  double *chances, *expected;           // [most]
} TreeGrowth;

typedef struct {
  double chance, stated, value, reached;  // calibrated; as stated; expected tokens; those of the parent
  int64_t token, source, first_child, next, parent;
} OfferedNode;

// `grow_tree` of core/tree.py for nodes that are not samples and have no payoffs; the number of nodes, −1 without memory.
int64_t saltus_grow_tree(TreeGrowth *a) {
  int64_t size = 0;
  for (int64_t d = 0; d < a->num_drafted; d++) size += a->drafted[d].count;
  OfferedNode *nodes = malloc((size + 1) * sizeof *nodes + 3 * (size + 1) * sizeof(int64_t));
  if (!nodes) return -1;
  int64_t *places = (int64_t *)(nodes + size + 1), *open = places + size + 1, *path = open + size + 1;
  int64_t offered = 0, root = -1, waiting = 0, made = 0;
  for (int64_t d = 0; d < a->num_drafted; d++) {
    const DraftedNodes *from = a->drafted + d;
    for (int64_t i = 0; i < from->count; i++) places[i] = -1;  // of its nodes among those offered; −2: not a leaf
    for (int64_t i = 0; i < from->count; i++)
      if (from->parents[i] >= 0) places[from->parents[i]] = -2;
    for (int64_t leaf = 0; leaf < from->count; leaf++) {
      if (places[leaf] == -2) continue;
      int64_t depth = 0, at = -1;
      for (int64_t i = leaf; i >= 0; i = from->parents[i]) path[depth++] = i;
      for (int64_t step = 0; step < depth && step < a->max_depth; step++) {
        const int64_t i = path[depth - 1 - step];
        int64_t *link = at < 0 ? &root : &nodes[at].first_child;
        while (*link >= 0 && nodes[*link].token != from->tokens[i]) link = &nodes[*link].next;
        if (*link < 0) {
          *link = offered;
          nodes[offered++] = (OfferedNode){.chance = -1, .token = from->tokens[i], .first_child = -1, .next = -1};
        }
        OfferedNode *node = nodes + (at = *link);
        const double stated = from->chances[i];
        double chance = stated;
        if (a->records) {
          const int64_t third = (int64_t)(stated * 3) < 2 ? (int64_t)(stated * 3) : 2;
          const double *record = a->records + (from->source * 3 + third) * 2;
          chance = stated * (record[0] + a->prior) / (record[1] + a->prior);
          chance = chance < 0.99 ? chance : 0.99;
        }
        if (chance > node->chance) node->chance = chance, node->stated = stated, node->source = from->source;
      }
    }
  }
  int64_t children = root, parent = -1;
  double reached = 1;
  while (made < a->most) {
    for (int64_t i = children; i >= 0; i = nodes[i].next) {
      nodes[i].reached = reached * nodes[i].chance, nodes[i].parent = parent;
      nodes[i].value = nodes[i].reached > 0 ? nodes[i].reached : 0;
      open[waiting++] = i;
    }
    children = -1;
    if (!waiting) break;
    int64_t best = 0;
    for (int64_t i = 1; i < waiting; i++) {
      const OfferedNode *one = nodes + open[i], *other = nodes + open[best];
      if (one->value > other->value || (one->value == other->value && open[i] < open[best])) best = i;
    }
    const OfferedNode *node = nodes + open[best];
    open[best] = open[--waiting];
    if (node->parent >= 0 && node->value < a->least) continue;
    a->tokens[made] = node->token, a->parents[made] = node->parent, a->sources[made] = node->source;
    a->chances[made] = node->stated, a->expected[made] = node->value;
    children = node->first_child, parent = made++, reached = node->reached;
  }
  free(nodes);
  return made;
}

// `CallCost.seconds_for` of core/control/call_cost.py: sizes ascend.
double saltus_call_seconds(const int64_t *sizes, const double *seconds, int64_t count, int64_t rows) {
  if (!count) return 1 + 0.02 * (double)rows;
  int64_t above = 0;
  while (above < count && sizes[above] < rows) above++;
  if (above == count) {
    const int64_t last = count - 1, span = sizes[last] - sizes[0] > 1 ? sizes[last] - sizes[0] : 1;
    const double slope = (seconds[last] - seconds[0]) / (double)span, most = seconds[last] * 0.01;
    return seconds[last] + (most > slope ? most : slope) * (double)(rows - sizes[last]);
  }
  if (!above || sizes[above] == rows) return seconds[above];
  const double share = (double)(rows - sizes[above - 1]) / (double)(sizes[above] - sizes[above - 1]);
  return seconds[above - 1] * (1 - share) + seconds[above] * share;
}

// `Controller.num_nodes` for nodes that are not samples.
int64_t saltus_num_nodes(const int64_t *sizes, const double *seconds, int64_t count, const double *expected, int64_t nodes) {
  double best_rate = 1 / saltus_call_seconds(sizes, seconds, count, 1), sum = 1;
  int64_t best = 0;
  for (int64_t n = 1; n <= nodes; n++) {
    sum += expected[n - 1];
    const double rate = sum / saltus_call_seconds(sizes, seconds, count, n + 1);
    if (rate > best_rate) best = n, best_rate = rate;
  }
  return best;
}

// The rows of decided tokens and of a tree's nodes after them: their positions, and which of [rows, rows] each sees.
void saltus_tree_rows(const int64_t *parents, int64_t nodes, int64_t decided, int64_t past, int64_t *positions, uint8_t *visible) {
  const int64_t rows = decided + nodes;
  for (int64_t r = 0; r < decided; r++) {
    positions[r] = past + r;
    for (int64_t c = 0; c < rows; c++) visible[r * rows + c] = c <= r;
  }
  for (int64_t n = 0; n < nodes; n++) {
    const int64_t r = decided + n, parent = parents[n] < 0 ? decided - 1 : decided + parents[n];
    uint8_t *row = visible + r * rows;
    positions[r] = parents[n] < 0 ? past + decided : positions[parent] + 1;
    for (int64_t c = 0; c < rows; c++) row[c] = c < decided || (parents[n] >= 0 && visible[parent * rows + c]) || c == r;
  }
}

// Parts [parts, rows, bytes] beside each other: [rows, parts, bytes].
void saltus_set_beside(const char *from, int64_t parts, int64_t rows, int64_t bytes, char *to) {
  for (int64_t p = 0; p < parts; p++)
    for (int64_t r = 0; r < rows; r++) memcpy(to + (r * parts + p) * bytes, from + (p * rows + r) * bytes, bytes);
}
