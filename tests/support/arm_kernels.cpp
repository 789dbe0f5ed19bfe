// The kernels' functions beside plain loops in double: a program for processors that no test has.
// Prints what differs, and returns how many checks failed.

#include "kernels.cpp"

#include <cstdio>
#include <vector>

static uint64_t state = 88172645463325252ull;
static float uniform() {  // in -1..1
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (float)((double)(state >> 11) / (1ull << 52) - 1.0);
}
static bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static float wide(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static std::vector<bf16> numbers(i64 count, float scale = 1.0f) {
  std::vector<bf16> all(count);
  for (bf16& x : all) x = narrow(uniform() * scale);
  return all;
}

static int failures = 0;
static void check(const char* what, i64 a, i64 b, double found, double expected, double bound) {
  if (std::abs(found - expected) <= bound + std::abs(expected) * 0.01) return;
  if (++failures <= 20)
    printf("%s [%ld, %ld]: %g, not %g\n", what, (long)a, (long)b, found, expected);
}

static double silu(double x) { return x / (1 + std::exp(-x)); }
static double gelu(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// A weight [panels * 32, k] as the kernels read it, `group` numbers of a row together.
template <class T> static std::vector<T> blocked(const std::vector<T>& w, i64 k, i64 group) {
  std::vector<T> out(w.size());
  for (i64 row = 0; row < (i64)w.size() / k; ++row)
    for (i64 i = 0; i < k; ++i)
      out[((row / 32 * (k / group) + i / group) * 32 + row % 32) * group + i % group] = w[row * k + i];
  return out;
}

// x [k] times factors and Hadamard matrices, as `spread` has it, term by term.
static std::vector<double> spread_plainly(const bf16* x, i64 k, const std::vector<float>& factors) {
  const i64 groups = k / 16;
  i64 first = 1;
  while (2 * first <= groups) first *= 2;
  std::vector<double> y(k);
  for (i64 i = 0; i < k; ++i) y[i] = wide(x[i]) * (double)factors[i];
  // `count` numbers, `apart`.
  const auto transform = [](double* from, i64 count, i64 apart) {
    std::vector<double> to(count, 0.0);
    for (i64 i = 0; i < count; ++i)
      for (i64 j = 0; j < count; ++j)
        to[i] += from[j * apart] * (__builtin_popcountll(i & j) % 2 ? -1 : 1) / std::sqrt((double)count);
    for (i64 i = 0; i < count; ++i) from[i * apart] = to[i];
  };
  for (i64 group = 0; group < groups; ++group) transform(y.data() + group * 16, 16, 1);
  for (i64 lane = 0; lane < 16; ++lane) transform(y.data() + lane, first, 16);
  if (first == groups) return y;
  i64 last = std::min<i64>(first, 8);
  while (last < first && last < 2 * (groups - first)) last *= 2;
  const i64 begin = k - 16 * last;
  for (i64 i = begin; i < k; ++i) y[i] *= factors[k + i];
  for (i64 lane = 0; lane < 16; ++lane) transform(y.data() + begin + lane, last, 16);
  return y;
}

enum Kind { kBf16, kInt8, kInt4 };

// Four-bit weights as the kernels read them, and in int8 in `q` [rows, k].
static std::vector<uint8_t> int4_panels(std::vector<int8_t>& q, i64 k) {
  const i64 rows = (i64)q.size() / k, groups = k / 32;
  std::vector<uint8_t> out(rows / 32 * Int4::panel_bytes(k), 0);
  for (i64 row = 0; row < rows; ++row)
    for (i64 group = 0; group < groups; ++group) {
      uint8_t* at = out.data() + (row / 32 * groups + group) * kGroup4Bytes;
      const i64 column = row % 32, factor = 1 + (row + group) % 15;
      const i64 offset = std::min<i64>(127, std::max<i64>(15 * factor - 127, 8 * factor - group % 3));
      at[column] = (uint8_t)factor, at[32 + column] = (uint8_t)offset;
      for (i64 i = 0; i < 32; ++i) {
        const i64 number = (i64)(7.5 + 7.5 * uniform() + 0.5), four = i / 4;
        q[row * k + group * 32 + i] = (int8_t)(number * factor - offset);
        at[64 + (four / 2 * 2 + column / 16) * 64 + column % 16 * 4 + i % 4] |=
            (uint8_t)(number << (four % 2 * 4));
      }
    }
  return out;
}

static void products(i64 m, i64 n, i64 k, Gate gate, Kind kind) {
  const bool int8 = kind != kBf16;
  const i64 width = gate ? 16 : 32, rows = (n + width - 1) / width * 32;
  const std::vector<bf16> x = numbers(m * k), w = numbers(rows * k, 0.2f);
  std::vector<int8_t> q(rows * k);
  std::vector<float> scales(rows), bias(rows);
  std::vector<int32_t> offset(rows, 0);
  for (i64 row = 0; row < rows; ++row) {
    scales[row] = 0.2f / 127, bias[row] = uniform();
    for (i64 i = 0; i < k; ++i) q[row * k + i] = (int8_t)std::lround(wide(w[row * k + i]) / scales[row]);
  }
  const std::vector<uint8_t> narrow = kind == kInt4 ? int4_panels(q, k) : std::vector<uint8_t>();
  for (i64 i = 0; i < rows * k; ++i) offset[i / k] += 128 * q[i];
  const auto packed = blocked(w, k, 2);
  const auto packed_q = blocked(q, k, 4);
  Weight weight{};
  weight.packed = kind == kInt4 ? (const void*)narrow.data()
                  : int8        ? (const void*)packed_q.data()
                                : packed.data();
  weight.is_int4 = kind == kInt4;
  weight.bias = bias.data();
  std::vector<float> factors(2 * k);
  for (float& factor : factors) factor = uniform() < 0 ? -1 : 1;
  for (i64 i = 0; i < k; ++i) factors[i] *= 1 + 0.5f * uniform();
  if (int8) weight.scales = scales.data(), weight.offset = offset.data();
  if (int8) weight.factors = factors.data();
  weight.n = n, weight.k = k, weight.gate = gate;
  std::vector<bf16> room(m * k + 64), y(m * n);
  std::vector<float> row_scales(m);
  const Scratch scratch{room.data(), row_scales.data()};
  linear(&weight, x.data(), &scratch, y.data(), m);
  for (i64 r = 0; r < m; ++r) {
    std::vector<double> inputs(k);
    for (i64 i = 0; i < k; ++i) inputs[i] = wide(x[r * k + i]);
    if (int8) inputs = spread_plainly(x.data() + r * k, k, factors);
    for (i64 c = 0; c < n; ++c) {
      const auto column = [&](i64 row) {
        double sum = bias[row];
        for (i64 i = 0; i < k; ++i)
          sum += inputs[i] *
                 (int8 ? (double)q[row * k + i] * scales[row] : (double)wide(w[row * k + i]));
        return sum;
      };
      const i64 up = c / 16 * 32 + c % 16;
      const auto gated = [&](double x) { return gate == kSilu ? silu(x) : gelu(x); };
      const double expected = gate ? gated(column(up)) * column(up + 16) : column(c);
      check(kind == kInt4 ? "int4 product" : int8 ? "int8 product" : "product", r, c, wide(y[r * n + c]), expected,
            int8 ? 0.05 : 0.01);
    }
  }
}

static void norms(i64 rows, i64 size) {
  std::vector<bf16> x = numbers(rows * size), out(rows * size);
  const std::vector<bf16> delta = numbers(rows * size), weight = numbers(size), before = x;
  const float offset = rows % 2;
  add_rms_norm(x.data(), delta.data(), nullptr, weight.data(), offset, out.data(), 1e-6f, rows,
               size);
  for (i64 r = 0; r < rows; ++r) {
    double squares = 0;
    for (i64 i = 0; i < size; ++i) {
      const i64 at = r * size + i;
      check("sum", r, i, wide(x[at]), (double)wide(before[at]) + wide(delta[at]), 0.01);
      squares += (double)wide(x[at]) * wide(x[at]);
    }
    for (i64 i = 0; i < size; ++i)
      check("norm", r, i, wide(out[r * size + i]),
            wide(x[r * size + i]) / std::sqrt(squares / size + 1e-6) * (wide(weight[i]) + offset), 0.01);
  }
}

// Rotation, the store into blocks and attention over them, of one sequence.
static void attention(i64 context, i64 queries, i64 heads, i64 kv_heads, i64 dim,
                      i64 window = 0) {
  const i64 blocks = (context + kBlock - 1) / kBlock, group = heads / kv_heads;
  const i64 stride = 2 * kBlock * kv_heads * dim, half = dim / 2, width = (heads + 2 * kv_heads) * dim;
  std::vector<bf16> cache(blocks * stride, 0x7fc0), rows = numbers(context * width);  // NaN
  std::vector<bf16> cosines(context * half), sines(context * half), before = rows;
  for (i64 i = 0; i < context * half; ++i)
    cosines[i] = narrow(std::cos(0.1 * i)), sines[i] = narrow(std::sin(0.1 * i));
  norm_rope(rows.data(), width, nullptr, nullptr, 0, 0, cosines.data(), sines.data(), context, heads,
            kv_heads, dim);
  for (i64 t = 0; t < context; ++t)
    for (i64 i = 0; i < half; ++i) {
      const double a = wide(before[t * width + i]), b = wide(before[t * width + half + i]);
      const double c = wide(cosines[t * half + i]), s = wide(sines[t * half + i]);
      check("rotation", t, i, wide(rows[t * width + i]), a * c - b * s, 0.01);
      check("rotation", t, half + i, wide(rows[t * width + half + i]), b * c + a * s, 0.01);
    }
  std::vector<int32_t> slots(context), table(blocks);
  for (i64 b = 0; b < blocks; ++b) table[b] = (int32_t)(blocks - 1 - b);
  for (i64 t = 0; t < context; ++t) slots[t] = table[t / kBlock] * kBlock + (int32_t)(t % kBlock);
  bf16 *keys = cache.data(), *values = keys + stride / 2;
  const bf16 *k = rows.data() + heads * dim, *v = k + kv_heads * dim;
  kv_store(k, v, width, width, keys, values, stride, slots.data(), context, kv_heads, dim);
  std::vector<int32_t> work;
  for (i64 row = 0; row < queries * group; row += kRows) work.push_back(0), work.push_back((int)row);
  const int32_t cu_q[2] = {0, (int32_t)queries}, seq_len = (int32_t)context;
  const Ragged ragged{1, cu_q, &seq_len, table.data(), blocks, 1, 0, work.data(),
                      (i64)work.size() / 2};
  std::vector<bf16> out(queries * heads * dim);
  const i64 first = context - queries;
  const float scale = 1 / std::sqrt((float)dim);
  paged_attention(rows.data() + first * width, width, keys, values, stride, out.data(), &ragged, 0,
                  heads, kv_heads, dim, scale, window);
  for (i64 t = 0; t < queries; ++t)
    for (i64 h = 0; h < heads; ++h) {
      const bf16* q = rows.data() + (first + t) * width + h * dim;
      std::vector<double> weight(first + t + 1), sum(dim, 0.0);
      double total = 0;
      const i64 begin = window ? std::max<i64>(0, first + t + 1 - window) : 0;
      for (i64 s = begin; s <= first + t; ++s) {
        double score = 0;
        for (i64 d = 0; d < dim; ++d)
          score += (double)wide(q[d]) * wide(k[s * width + h / group * dim + d]);
        total += weight[s] = std::exp(score * scale);
      }
      for (i64 s = begin; s <= first + t; ++s)
        for (i64 d = 0; d < dim; ++d)
          sum[d] += weight[s] / total * wide(v[s * width + h / group * dim + d]);
      for (i64 d = 0; d < dim; ++d)
        check("attention", t, h * dim + d, wide(out[(t * heads + h) * dim + d]), sum[d], 0.01);
    }
}

int main() {
  set_num_threads(2);
  for (Kind kind : {kBf16, kInt8})
    for (i64 m : {1, 2, 3, 13})
      products(m, 40, 48, kNoGate, kind), products(m, 23, 64, kSilu, kind),
          products(m, 23, 64, kGeluTanh, kind), products(m, 96, 16, kNoGate, kind);
  for (i64 m : {1, 2, 3, 13, 17})
    products(m, 40, 96, kNoGate, kInt4), products(m, 23, 64, kSilu, kInt4);
  norms(3, 48), norms(20, 96);
  attention(1, 1, 4, 2, 16), attention(70, 1, 6, 2, 32), attention(37, 37, 4, 4, 48);
  attention(150, 21, 8, 2, 64), attention(90, 2, 2, 1, 128);
  attention(600, 9, 4, 2, 32);
  attention(150, 21, 8, 2, 64, 37), attention(90, 1, 2, 1, 128, 16), attention(70, 1, 6, 2, 32, 1);
  printf("%d checks failed\n", failures);
  return failures > 0;
}
