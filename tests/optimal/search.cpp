// Layered best-first search for the cheapest schedule of a data-flow graph within a byte limit. See exact.py.
//
// Limit that forced C++: a proof looks at up to some millions of states, about two microseconds each; Python takes a
// hundred times as long.
//
// State: `layer` tasks have run for the first time, in the given order, and the storages in `live` are kept. A move runs
// the next task, or an earlier one again. Storages are dropped only where a run needs their room, and then no more of
// them than it needs: keeping more is never worse. So every schedule is matched by one that the search knows.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <vector>

namespace {

using Set = unsigned __int128;  // of storages, or of tasks
using Cost = int64_t;
constexpr Cost kNever = std::numeric_limits<Cost>::max() / 4;
constexpr int kMost = 128;
constexpr size_t kTight = 16;  // first runs that the bound looks at
constexpr int kSteps = 5000;  // in a search for room, where not all ways are looked at

int first(Set set) {
  const auto low = static_cast<uint64_t>(set);
  return low ? __builtin_ctzll(low) : 64 + __builtin_ctzll(static_cast<uint64_t>(set >> 64));
}
Set bit(int at) { return static_cast<Set>(1) << at; }
bool has(Set set, int at) { return (set >> at) & 1; }

struct Hash {
  size_t operator()(Set set) const {
    uint64_t mixed = static_cast<uint64_t>(set) * 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(set >> 64);
    mixed ^= mixed >> 31;
    mixed *= 0xBF58476D1CE4E5B9ull;
    return mixed ^ (mixed >> 29);
  }
};

struct Item {  // what the bound may drop at a task: the storages of one producer that are read later
  Set producer;
  int64_t bytes;
  Cost cost;  // to make them again
};

struct Graph {
  int tasks, storages;
  int64_t budget;
  Cost total;  // of all tasks once
  std::vector<Cost> cost;
  std::vector<Set> reads, makes;    // of each task; results of the step, which always stay, are not among them
  std::vector<int64_t> made, size;  // bytes of all that a task makes, with results; bytes of a storage
  std::vector<int> producer;
  std::vector<int64_t> stay;  // bytes of results before each task
  std::vector<Set> wanted;    // by layer: storages made before it that first runs from it on read
  std::vector<Set> useful;    // by layer: storages that can serve a first run from it on, directly or by a rerun
  std::vector<Set> readers;   // of each storage
  std::vector<std::vector<Item>> items;
  std::vector<int64_t> over;  // bytes above the budget at a first run if all that is read later were held
  std::vector<std::vector<int>> tight;  // by layer: first runs to come at which not all fits, the tightest first

  int64_t bytes(Set set) const {
    int64_t sum = 0;
    for (; set; set &= set - 1) sum += size[first(set)];
    return sum;
  }

  void prepare() {
    wanted.assign(tasks + 1, 0);
    useful.assign(tasks + 1, 0);
    readers.assign(storages, 0);
    for (int task = 0; task < tasks; ++task)
      for (Set left = reads[task]; left; left &= left - 1) readers[first(left)] |= bit(task);
    Set before = 0, later = 0;
    for (int task = 0; task < tasks; ++task) before |= makes[task];
    for (int layer = tasks - 1; layer >= 0; --layer) {
      before &= ~makes[layer];
      later |= reads[layer];
      wanted[layer] = later & before;
      Set all = wanted[layer];
      for (int task = layer - 1; task >= 0; --task)
        if (makes[task] & all) all |= reads[task];
      useful[layer] = all;
    }
    items.assign(tasks, {});
    over.assign(tasks, 0);
    for (int task = 0; task < tasks; ++task) {
      const Set held = wanted[task] & ~reads[task] & (task ? ~Set(0) : 0);
      over[task] = stay[task] + made[task] + bytes(reads[task]) + bytes(held) - budget;
      for (int other = 0; other < task; ++other)
        if (const int64_t of = bytes(makes[other] & held)) items[task].push_back({bit(other), of, chain(other, of)});
      std::sort(items[task].begin(), items[task].end(), [](const Item& a, const Item& b) {
        return static_cast<double>(a.cost) * b.bytes < static_cast<double>(b.cost) * a.bytes;
      });
    }
  }

  void find_tight() {
    std::vector<Cost> alone(tasks);
    for (int task = 0; task < tasks; ++task) alone[task] = squeezed_at(task, 0);
    tight.assign(tasks + 1, {});
    for (int layer = 0; layer < tasks; ++layer) {
      for (int task = layer; task < tasks; ++task)
        if (over[task] > 0) tight[layer].push_back(task);
      std::stable_sort(tight[layer].begin(), tight[layer].end(), [&](int a, int b) { return alone[a] > alone[b]; });
      if (tight[layer].size() > kTight) tight[layer].resize(kTight);
    }
  }

  // Cost of `task` and of what must run again with it: to hold an operand that nobody else reads, and that is no smaller
  // than the `of` bytes dropped, would free nothing.
  Cost chain(int task, int64_t of) const {
    Set in_chain = bit(task);
    std::vector<int> stack{task};
    Cost sum = 0;
    while (!stack.empty()) {
      const int top = stack.back();
      stack.pop_back();
      sum += cost[top];
      for (Set left = reads[top]; left; left &= left - 1) {
        const int storage = first(left), maker = producer[storage];
        if (readers[storage] != bit(top) || size[storage] < of || has(in_chain, maker)) continue;
        in_chain |= bit(maker);
        stack.push_back(maker);
      }
    }
    return sum;
  }

  // Tasks that must run again at least once, and their cost: who makes what is wanted and not there, and so on.
  Cost again(int layer, Set live, Set* which) const { return again_for(wanted[layer] & ~live, live, which); }

  Cost again_for(Set missing, Set live, Set* which) const {
    Cost sum = 0;
    Set tasks_again = 0;
    while (missing) {
      const int task = producer[first(missing)];
      sum += cost[task];
      tasks_again |= bit(task);
      missing &= ~makes[task];
      Set need = reads[task] & ~live;
      for (; need; need &= need - 1)
        if (!has(tasks_again, producer[first(need)])) missing |= bit(first(need));
    }
    *which = tasks_again;
    return sum;
  }

  // What must run again besides `which` so that what is held and read later fits beside one first run to come.
  Cost squeezed_at(int task, Set which) const {
    int64_t excess = over[task];
    for (const Item& item : items[task])
      if (which & item.producer) excess -= item.bytes;
    if (excess <= 0) return 0;
    Cost sum = 0;
    for (const Item& item : items[task]) {
      if (which & item.producer) continue;
      if (item.bytes >= excess) return sum + static_cast<Cost>(static_cast<double>(item.cost) * excess / item.bytes);
      sum += item.cost;
      excess -= item.bytes;
    }
    return kNever;
  }

  // The same at the tightest of all first runs to come, as far as it takes to reach `enough`. `where`: one to try first.
  Cost squeezed(int layer, Set which, Cost enough, int16_t* where) const {
    Cost most = *where >= layer ? squeezed_at(*where, which) : 0;
    for (size_t at = 0; at < tight[layer].size() && most < enough; ++at) {
      const Cost cost_of = squeezed_at(tight[layer][at], which);
      if (cost_of > most) most = cost_of, *where = static_cast<int16_t>(tight[layer][at]);
    }
    return most;
  }
};

struct State {
  Set live;
  Cost spent, least;  // on reruns so far; a lower bound on all of them
  int parent;         // the state before the move
  int16_t task;       // the move
  int16_t where;      // the first run at which the bound is tightest
  bool done;
};

struct Layer {
  std::unordered_map<Set, int, Hash> known;
  std::vector<int> fresh;  // states that were not looked at
};

class Search {
 public:
  Search(const Graph& graph, Cost limit, int64_t width, double seconds, bool lazy)
      : graph_(graph), limit_(limit), width_(width), lazy_(lazy), end_(now() + seconds) {}

  // All layers once; at most `width` states at each number of reruns in a layer. Schedules that cost `limit` or more
  // are not looked for.
  void run() {
    offer(now_, 0, 0, 0, 0, -1, -1);
    for (int layer = 0; layer < graph_.tasks; ++layer) {
      while (!now_.fresh.empty()) {
        const std::vector<int> batch = most_promising();
        for (const int state : batch) {
          if (states_[state].done) continue;
          if (out_of_time()) {
            dropped = std::min(dropped, states_[state].least);
            continue;
          }
          states_[state].done = true;
          ++looked_at;
          expand(layer, state);
        }
      }
      now_ = std::move(next_);
      next_ = Layer();
    }
    if (!now_.fresh.empty()) {
      best = now_.fresh.front();  // nothing is alive at the end: there is one state
      found = states_[best].spent;
    }
  }

  std::vector<int> path() const {
    std::vector<int> runs;
    for (int at = best; at >= 0 && states_[at].task >= 0; at = states_[at].parent) runs.push_back(states_[at].task);
    std::reverse(runs.begin(), runs.end());
    return runs;
  }

  Cost dropped = kNever;  // the least bound among states that were not looked at
  Cost found = kNever;
  int best = -1;
  int64_t looked_at = 0;

 private:
  // Seconds of this thread on a processor: a limit in them means the same on a busy machine.
  static double now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  std::vector<int> most_promising() {
    std::vector<int> batch;
    batch.swap(now_.fresh);
    if (static_cast<int64_t>(batch.size()) <= width_) return batch;
    const auto better = [this](int a, int b) {
      const State &left = states_[a], &right = states_[b];
      return left.least != right.least ? left.least < right.least : left.spent > right.spent;
    };
    std::nth_element(batch.begin(), batch.begin() + width_, batch.end(), better);
    for (size_t at = width_; at < batch.size(); ++at)
      if (!states_[batch[at]].done) dropped = std::min(dropped, states_[batch[at]].least);
    batch.resize(width_);
    return batch;
  }

  // What is left out from here on costs at least this much.
  void cut(Cost least) {
    if (least < kNever) dropped = std::min(dropped, least);
  }

  bool out_of_time() {
    if (++ticks_ % 256 == 0 && now() > end_) late_ = true;
    return late_ || states_.size() > 40'000'000;
  }

  void offer(Layer& into, int layer, Set live, Cost spent, Cost least, int parent, int task) {
    Set which;
    const Cost again = graph_.again(layer, live, &which);
    if (spent + again >= limit_) return cut(spent + again);
    live &= graph_.useful[layer];
    // What serves only reruns that nobody must make, and that would cost too much, is of no use.
    for (Set idle = live & ~graph_.wanted[layer]; idle; idle &= idle - 1) {
      const int storage = first(idle);
      bool serves = false;
      for (Set by = graph_.readers[storage]; by && !serves; by &= by - 1) {
        const int reader = first(by);
        if (reader >= layer) continue;
        serves = has(which, reader) || spent + again + graph_.cost[reader] < limit_;
        if (!serves) cut(spent + again + graph_.cost[reader]);
      }
      if (!serves) live &= ~bit(storage);
    }
    int16_t where = parent < 0 ? -1 : states_[parent].where;
    const auto seen = into.known.find(live);
    if (seen != into.known.end() && states_[seen->second].spent <= spent) return;
    least = std::max(least, spent + again + graph_.squeezed(layer, which, limit_ - spent - again, &where));
    if (least >= limit_) return cut(least);
    int at;
    if (seen != into.known.end()) {
      at = seen->second;
      states_[at] = {live, spent, least, parent, static_cast<int16_t>(task), where, false};
    } else {
      at = static_cast<int>(states_.size());
      states_.push_back({live, spent, least, parent, static_cast<int16_t>(task), where, false});
      into.known.emplace(live, at);
    }
    into.fresh.push_back(at);
  }

  void expand(int layer, int at) {
    const State state = states_[at];
    move(layer, at, state, layer);
    Set now = ~Set(0);
    if (lazy_) graph_.again_for(graph_.reads[layer] & ~state.live, state.live, &now);
    for (int task = 0; task < layer; ++task) {
      if (!has(now, task)) continue;
      const Set made = graph_.makes[task] & graph_.useful[layer];
      if ((made & ~state.live) && !(graph_.reads[task] & ~state.live)) move(layer, at, state, task);
    }
  }

  // Runs `task` from a state, once for every least set of storages that makes room for it.
  void move(int layer, int at, const State& state, int task) {
    if (graph_.reads[task] & ~state.live) return;
    const bool forward = task == layer;
    const Cost spent = state.spent + (forward ? 0 : graph_.cost[task]);
    const Set kept = state.live & ~graph_.makes[task];
    const int64_t excess = graph_.stay[layer] + graph_.made[task] + graph_.bytes(kept) - graph_.budget;
    after_ = forward ? layer + 1 : layer;
    into_ = forward ? &next_ : &now_;
    made_ = graph_.makes[task];
    spent_ = spent, least_ = state.least, parent_ = at, task_ = task;
    Set which;
    const Cost again = graph_.again(after_, kept | made_, &which);
    if (spent + again >= limit_) return cut(spent + again);
    if (excess <= 0) {
      offer(*into_, after_, kept | made_, spent, state.least, at, task);
      return;
    }
    candidates_.clear();
    for (Set left = kept & ~graph_.reads[task]; left; left &= left - 1) candidates_.push_back(first(left));
    std::sort(candidates_.begin(), candidates_.end(), [this](int a, int b) { return graph_.size[a] > graph_.size[b]; });
    rest_.assign(candidates_.size() + 1, 0);
    for (int i = static_cast<int>(candidates_.size()) - 1; i >= 0; --i)
      rest_[i] = rest_[i + 1] + graph_.size[candidates_[i]];
    allowed_ = limit_, steps_ = kSteps;
    if (!lazy_) return make_room(0, excess, kept, which, spent + again);
    // Only what is cheap to lose: twice as much is allowed until there is room, and then once more.
    rooms_ = 0;
    for (Cost more = graph_.total / 256, last = kNever; more < 2 * last && steps_ > 0; more *= 2) {
      allowed_ = std::min(limit_, spent + again + more);
      make_room(0, excess, kept, which, spent + again);
      if (rooms_ && last == kNever) last = more;
      if (allowed_ == limit_ || more > 4 * graph_.total) break;
    }
  }

  // From large to small: what is dropped last is the smallest, and room was too little before it. So none is idle.
  void make_room(size_t from, int64_t excess, Set kept, Set which, Cost least) {
    if (lazy_ ? --steps_ < 0 : out_of_time()) {
      dropped = std::min(dropped, least_);
      return;
    }
    if (excess <= 0) {
      ++rooms_;
      offer(*into_, after_, kept | made_, spent_, least_, parent_, task_);
      return;
    }
    for (size_t i = from; i < candidates_.size() && rest_[i] >= excess; ++i) {
      const int storage = candidates_[i];
      Set more = which;
      Cost cost = least;
      if (has(graph_.wanted[after_], storage) && !has(which, graph_.producer[storage])) {
        more |= bit(graph_.producer[storage]);
        cost += graph_.cost[graph_.producer[storage]];
      }
      if (cost >= allowed_)
        cut(cost);
      else
        make_room(i + 1, excess - graph_.size[storage], kept & ~bit(storage), more, cost);
    }
  }

  const Graph& graph_;
  const Cost limit_;
  const int64_t width_;
  const bool lazy_;  // run again only what the next task cannot do without
  const double end_;
  bool late_ = false;
  uint64_t ticks_ = 0;
  Layer now_, next_;
  std::vector<State> states_;
  std::vector<int> candidates_;
  std::vector<int64_t> rest_;
  int after_ = 0, parent_ = 0, task_ = 0;
  Layer* into_ = nullptr;
  Set made_ = 0;
  Cost spent_ = 0, least_ = 0, allowed_ = 0;
  int steps_ = 0, rooms_ = 0;
};

}  // namespace

// `cost` of a run, `made` bytes of all it makes, `result` bytes of the results among them: by task. `size`, `producer`:
// by storage that is no result. `read_pairs`: (task, storage), `reads` of them. `limit` below zero is none. `runs` has
// room for `most` tasks. `numbers` receives: cost of reruns (-1: nothing found), a lower bound on it, states looked at,
// number of runs. Returns 0, or 1 where the graph is too large.
extern "C" int optimal_search(int tasks, int storages, int64_t budget, const int64_t* cost, const int64_t* made,
                              const int64_t* result, const int64_t* size, const int* producer, int reads,
                              const int* read_pairs, int64_t width, double seconds, int64_t limit, int lazy, int most, int* runs,
                              int64_t* numbers) {
  if (tasks > kMost || storages > kMost) return 1;
  Graph graph{tasks, storages, budget, std::accumulate(cost, cost + tasks, Cost(0)), {cost, cost + tasks}, std::vector<Set>(tasks, 0), std::vector<Set>(tasks, 0),
              {made, made + tasks}, {size, size + storages}, {producer, producer + storages}, {}, {}, {}, {}, {}, {}};
  graph.stay.assign(tasks + 1, 0);
  for (int task = 0; task < tasks; ++task) graph.stay[task + 1] = graph.stay[task] + result[task];
  for (int at = 0; at < reads; ++at) graph.reads[read_pairs[2 * at]] |= bit(read_pairs[2 * at + 1]);
  for (int storage = 0; storage < storages; ++storage) graph.makes[producer[storage]] |= bit(storage);
  graph.prepare();
  graph.find_tight();
  Search search(graph, limit < 0 ? kNever : limit, width, seconds, lazy != 0);
  search.run();
  const std::vector<int> path = search.path();
  numbers[0] = search.best < 0 ? -1 : search.found;
  numbers[1] = std::min(search.dropped, search.best < 0 ? kNever : search.found);
  numbers[2] = search.looked_at;
  numbers[3] = static_cast<int64_t>(path.size());
  for (size_t at = 0; at < path.size() && at < static_cast<size_t>(most); ++at) runs[at] = path[at];
  return 0;
}
