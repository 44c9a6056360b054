// A text in layers that keep a state: decided rows that continue it, and a tree of nodes after them. The state is that after
// the last decided row. Of nodes only the inputs are kept; the next call begins with those that were accepted, by the very
// operations that decided rows take, so that a state's bits are those of one token after the other.
#pragma once
#include <stdint.h>
#include <string.h>

typedef struct {
  char *states, *inputs;    // of all layers; of all nodes, all layers' of a node together
  const int32_t *parents;   // [nodes]: a node before it, −1: the last decided row
  const int32_t *accepted;  // [num_accepted]: nodes of the call before, in order
  const int64_t *marks;     // [num_marks], ascending: after so many decided rows
  char *const *copies;      // [num_marks]: the states are copied to these
  int64_t first, decided, nodes;  // the text's rows of the call: where they begin, and how many of each kind
  int64_t num_accepted, num_marks, node_bytes;  // node_bytes: between nodes in `inputs`
} RecurrentText;

// A state to begin with, and what a row makes of it: in one of some slots, or nowhere.
enum { NOWHERE = -1, KEPT = 0 };
typedef struct {
  int32_t row, from, to;  // row: accepted ones first; −1 − m: copy the kept state as mark m wants it
} Step;

typedef struct {
  Step *steps;
  int32_t *first_child, *sibling, *heaviest, *below;  // [nodes]; of the decided rows in the end, at `nodes`
  int64_t num_steps, nodes, first_row, slots;
} Plan;
static inline int64_t plan_bytes(const RecurrentText *t) {
  const int64_t steps = t->num_accepted + t->decided + t->nodes + t->num_marks;
  return steps * sizeof(Step) + 4 * (t->nodes + 1) * sizeof(int32_t);
}

static void plan_step(Plan *p, int64_t row, int64_t from, int64_t to) {
  p->steps[p->num_steps++] = (Step){.row = row, .from = from, .to = to};
}

// The nodes below a node, whose state is in a slot. The child with most nodes below it comes last and takes the slot over,
// so that a tree of n nodes needs no more than log2(n) + 1 slots.
static void plan_below(Plan *p, int32_t node, int64_t slot, int64_t top) {
  for (int32_t heavy; (heavy = p->heaviest[node]) >= 0; node = heavy) {
    for (int32_t child = p->first_child[node]; child >= 0; child = p->sibling[child]) {
      if (child == heavy) continue;
      const int leaf = p->first_child[child] < 0;
      plan_step(p, p->first_row + child, slot, leaf ? NOWHERE : top + 1);
      if (leaf) continue;
      if (top + 1 > p->slots) p->slots = top + 1;
      plan_below(p, child, top + 1, top + 1);
    }
    if (p->first_child[heavy] < 0) {
      plan_step(p, p->first_row + heavy, slot, NOWHERE);
      return;
    }
    const int64_t to = slot == KEPT ? ++top : slot;
    if (to > p->slots) p->slots = to;
    plan_step(p, p->first_row + heavy, slot, to);
    slot = to;
  }
}

// The order in which the rows of a text are taken; `room` has plan_bytes.
static Plan make_plan(const RecurrentText *t, void *room) {
  const int64_t n = t->nodes;
  Plan p = {.steps = room, .nodes = n, .first_row = t->num_accepted + t->decided};
  p.first_child = (int32_t *)(p.steps + t->num_accepted + t->decided + n + t->num_marks);
  p.sibling = p.first_child + n + 1, p.heaviest = p.sibling + n + 1, p.below = p.heaviest + n + 1;
  int64_t mark = 0;
  for (int64_t i = 0; i < t->num_accepted; i++) plan_step(&p, i, KEPT, KEPT);
  for (int64_t i = 0; i <= t->decided; i++) {
    if (i) plan_step(&p, t->num_accepted + i - 1, KEPT, KEPT);
    for (; mark < t->num_marks && t->marks[mark] == i; mark++) plan_step(&p, -1 - mark, KEPT, KEPT);
  }
  for (int64_t i = 0; i <= n; i++) p.first_child[i] = p.heaviest[i] = -1, p.below[i] = 0;
  for (int64_t i = n - 1; i >= 0; i--) {
    const int64_t parent = t->parents[i] < 0 ? n : t->parents[i];
    p.below[parent] += p.below[i] + 1;
    p.sibling[i] = p.first_child[parent], p.first_child[parent] = i;
    if (p.heaviest[parent] < 0 || p.below[i] > p.below[p.heaviest[parent]]) p.heaviest[parent] = i;
  }
  plan_below(&p, n, KEPT, KEPT);
  return p;
}
