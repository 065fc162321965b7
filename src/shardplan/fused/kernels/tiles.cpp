// Tile loops of fused operators on CPUs, and the words by which ranks tell each other that tiles are there.
//
// Sums are in f32, in the order in which the reference has them, and are rounded once, at the store. Loops are compiled
// for several instruction sets, of which the loader takes one at run time. No -ffast-math: it can set flush-to-zero.

#include <cstdint>
#include <cstring>
#include <ctime>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

namespace {

enum Kind { F32 = 0, BF16 = 1, F16 = 2 };

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline float wide(f16 x) {  // IEEE 754 binary16, without an instruction for it
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 0x3ff, bits;
  if (exponent == 31) bits = sign | 0x7f800000 | (mantissa << 13);
  else if (exponent) bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  else {
    float out = float(mantissa) * 5.9604644775390625e-8f;
    memcpy(&bits, &out, 4);
    bits |= sign;
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, f16* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) out->bits = uint16_t(sign | 0x7e00);
  else if (rest >= 0x47800000) out->bits = uint16_t(sign | 0x7c00);
  else if (rest < 0x38800000) {  // below the normal numbers: the float unit rounds to nearest even
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f;
    uint32_t low;
    memcpy(&low, &magnitude, 4);
    out->bits = uint16_t(sign | (low - 0x3f000000));
  } else {
    rest += 0xc8000fff + ((rest >> 13) & 1);
    out->bits = uint16_t(sign | (rest >> 13));
  }
}

struct Tile {
  int64_t begin, end;  // bags
  void* out;           // of the first bag and table
  int32_t* flag;       // null: nothing is signalled after it
  int64_t first, step; // the count signalled in epoch e is first + step * e
};

struct Bags {
  const void* const* tables;
  const int64_t* rows;
  int64_t count, dim, batch;  // tables, elements of a row, bags of a table
  const int64_t* indices;
  const int64_t* offsets;     // count * batch + 1
  const float* weights;       // null: 1
  int64_t mean, bag_stride, table_stride;  // strides of the result in elements
};

struct Lane {
  void* to;            // all of a rank's addends, on another rank
  int32_t* flag;       // the count behind them: first + step * epoch
  int64_t first, step;
};

struct Want {
  const int32_t* word;
  int64_t want, step;
};

inline void store_flag(int32_t* flag, int32_t value) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

// One block of up to 64 columns of a bag in registers.
template <typename T, int WIDTH>
inline __attribute__((always_inline)) void bag(const T* table, const Bags& b, int64_t from, int64_t to, int64_t column, float scale, T* out) {
  float sum[WIDTH] = {0};
  for (int64_t k = from; k < to; ++k) {
    const T* row = table + b.indices[k] * b.dim + column;
    if (k + 4 < to) __builtin_prefetch(table + b.indices[k + 4] * b.dim + column);
    if (b.weights) {
      const float w = b.weights[k];
      for (int c = 0; c < WIDTH; ++c) sum[c] += w * wide(row[c]);
    } else {
      for (int c = 0; c < WIDTH; ++c) sum[c] += wide(row[c]);
    }
  }
  for (int c = 0; c < WIDTH; ++c) narrow(b.mean ? sum[c] / scale : sum[c], out + column + c);
}

template <typename T>
inline __attribute__((always_inline)) void bags(const Bags& b, const Tile* tiles, int64_t count, int64_t epoch) {
  for (int64_t n = 0; n < count; ++n) {
    const Tile& tile = tiles[n];
    for (int64_t t = 0; t < b.count; ++t) {
      const T* table = static_cast<const T*>(b.tables[t]);
      for (int64_t k = tile.begin; k < tile.end; ++k) {
        const int64_t from = b.offsets[t * b.batch + k], to = b.offsets[t * b.batch + k + 1];
        T* out = static_cast<T*>(tile.out) + (k - tile.begin) * b.bag_stride + t * b.table_stride;
        const float scale = to > from ? float(to - from) : 1.0f;
        int64_t column = 0;
        for (; column + 64 <= b.dim; column += 64) bag<T, 64>(table, b, from, to, column, scale, out);
        for (; column + 16 <= b.dim; column += 16) bag<T, 16>(table, b, from, to, column, scale, out);
        for (; column < b.dim; ++column) bag<T, 1>(table, b, from, to, column, scale, out);
      }
    }
    if (tile.flag) store_flag(tile.flag, int32_t(uint32_t(tile.first + tile.step * epoch)));
  }
}

CLONES void bags_f32(const Bags& b, const Tile* tiles, int64_t n, int64_t e) { bags<float>(b, tiles, n, e); }
CLONES void bags_bf16(const Bags& b, const Tile* tiles, int64_t n, int64_t e) { bags<bf16>(b, tiles, n, e); }
CLONES void bags_f16(const Bags& b, const Tile* tiles, int64_t n, int64_t e) { bags<f16>(b, tiles, n, e); }

// y[m, c] = sum over k of a[m, k] x[k, c]; x is [columns, k] here, so that both run along k.
template <typename T>
inline __attribute__((always_inline)) void gemv(const T* a, int64_t stride, int64_t rows, int64_t depth, const float* x, int64_t columns, float* y) {
  for (int64_t m = 0; m < rows; ++m) {
    const T* row = a + m * stride;
    for (int64_t c = 0; c < columns; ++c) {
      const float* v = x + c * depth;
      float part[64] = {0};
      int64_t k = 0;
      for (; k + 64 <= depth; k += 64)
        for (int j = 0; j < 64; ++j) part[j] += wide(row[k + j]) * v[k + j];
      float sum = 0;
      for (; k < depth; ++k) sum += wide(row[k]) * v[k];
      for (int half = 32; half; half /= 2)
        for (int j = 0; j < half; ++j) part[j] += part[j + half];
      y[m * columns + c] = sum + part[0];
    }
  }
}

CLONES void gemv_f32(const float* a, int64_t s, int64_t m, int64_t k, const float* x, int64_t c, float* y) { gemv(a, s, m, k, x, c, y); }
CLONES void gemv_bf16(const bf16* a, int64_t s, int64_t m, int64_t k, const float* x, int64_t c, float* y) { gemv(a, s, m, k, x, c, y); }
CLONES void gemv_f16(const f16* a, int64_t s, int64_t m, int64_t k, const float* x, int64_t c, float* y) { gemv(a, s, m, k, x, c, y); }

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

inline bool there(const int32_t* word, int32_t want) {
  return int32_t(uint32_t(__atomic_load_n(word, __ATOMIC_ACQUIRE)) - uint32_t(want)) >= 0;
}

}  // namespace

extern "C" {

int64_t shardplan_version() { return 2; }

void shardplan_signal(int32_t* flag, int32_t value) { store_flag(flag, value); }

// 1 once the word is at least `want`, 0 after so many nanoseconds: 200 pauses, then yields, then sleeps.
int shardplan_wait(const int32_t* word, int32_t want, int64_t nanoseconds) {
  for (int k = 0; k < 200; ++k) {
    if (there(word, want)) return 1;
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  const int64_t begin = now();
  for (;;) {
    if (there(word, want)) return 1;
    const int64_t gone = now() - begin;
    if (gone > nanoseconds) return 0;
    if (gone < 1000000) sched_yield();
    else {
      timespec t = {0, 50000};
      nanosleep(&t, nullptr);
    }
  }
}

// 0, or 1 + the place of the first index that is no row of its table; then nothing has been written.
int64_t shardplan_check(const Bags* b) {
  for (int64_t t = 0; t < b->count; ++t)
    for (int64_t k = b->offsets[t * b->batch]; k < b->offsets[(t + 1) * b->batch]; ++k)
      if (uint64_t(b->indices[k]) >= uint64_t(b->rows[t])) return 1 + k;
  return 0;
}

void shardplan_bags(int kind, const Bags* b, const Tile* tiles, int64_t count, int64_t epoch) {
  if (kind == F32) bags_f32(*b, tiles, count, epoch);
  else if (kind == BF16) bags_bf16(*b, tiles, count, epoch);
  else bags_f16(*b, tiles, count, epoch);
}

void shardplan_gemv(int kind, const void* a, int64_t stride, int64_t rows, int64_t depth, const float* x, int64_t columns, float* y) {
  if (kind == F32) gemv_f32(static_cast<const float*>(a), stride, rows, depth, x, columns, y);
  else if (kind == BF16) gemv_bf16(static_cast<const bf16*>(a), stride, rows, depth, x, columns, y);
  else gemv_f16(static_cast<const f16*>(a), stride, rows, depth, x, columns, y);
}

// A sum in one shot: addends [rows, columns] go to every lane, and once those of all ranks have come, `sums` is their
// sum in the order of ranks, `came` [ranks, rows, columns]. Returns how many came within so many nanoseconds each.
int64_t shardplan_one_shot(int kind, const void* a, int64_t stride, int64_t rows, int64_t depth, const float* x, int64_t columns,
                           const Lane* lanes, const Want* wants, int64_t ranks, int64_t epoch, int64_t nanoseconds,
                           const float* came, float* addends, float* sums) {
  const int64_t size = rows * columns;
  shardplan_gemv(kind, a, stride, rows, depth, x, columns, addends);
  for (int64_t r = 0; r < ranks; ++r) {
    memcpy(lanes[r].to, addends, size * sizeof(float));
    store_flag(lanes[r].flag, int32_t(uint32_t(lanes[r].first + lanes[r].step * epoch)));
  }
  for (int64_t r = 0; r < ranks; ++r)
    if (!shardplan_wait(wants[r].word, int32_t(uint32_t(wants[r].want + wants[r].step * epoch)), nanoseconds)) return r;
  memcpy(sums, came, size * sizeof(float));
  for (int64_t r = 1; r < ranks; ++r)
    for (int64_t k = 0; k < size; ++k) sums[k] += came[r * size + k];
  return ranks;
}

}  // extern "C"
