// ATOMO's probabilities (Wang et al., NeurIPS 2018, Algorithm 1) without sorting: the sums over the atoms that each
// round needs, and the state that they update. CPU and CUDA sum in the same order, so they get the same bits.
//
// p_i = min(1, m_i / level) for magnitudes m, with the level at which they add up to the budget. As a function of 1 /
// level that sum is concave and piecewise linear, and Newton's method from the left finds where it equals the budget:
// each round sets p = 1 for the atoms above the current level and fits the level to the others, until no atom is added.
// Gradients need a handful of rounds. Magnitudes that fall geometrically can need as many rounds as there are atoms, so
// later rounds alternate with bisection.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"
#include "common/sums.h"

namespace gradzip {

// Sums run over segments of this many atoms, in the lanes of common/sums.h. The sum of segment j belongs to lane j %
// kSplitLanes; lanes are summed in pairs within each 32 (j and j + 16, then + 8, ...), and so are the eight results.
constexpr int64_t kSplitSegment = 1 << 10;
constexpr int kSplitLanes = 256;

constexpr int kNewtonRounds = 16;

// The sum of the magnitudes up to one limit, and the number of those above another.
struct Split {
  double rest;
  int64_t above;
};
struct Limits {
  double unit;  // power of two that scales the magnitudes
  double upto, over;
};

enum class Filling : int32_t { survey, rounds, done, failed };

// All zero at the start.
struct Water {
  Filling stage;
  int32_t round;
  int64_t exponent;  // of the unit
  double threshold, factor;  // p = 1 for magnitudes above the threshold, factor * magnitude for the others
  int64_t above;  // magnitudes above the threshold
  double low, level;  // bounds of the level
  double at;  // where to split next
};

GZ_HD double bits_double(uint64_t u) {
  double x;
  memcpy(&x, &u, 8);
  return x;
}
GZ_HD uint64_t double_bits(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  return u;
}
GZ_HD double power_of_two(int64_t exponent) { return bits_double(uint64_t(1023 + exponent) << 52); }

constexpr uint64_t kInfDoubleBits = uint64_t(0x7ff) << 52;

GZ_HD bool to_be_split(const Water& water) { return water.stage == Filling::survey || water.stage == Filling::rounds; }

// The first round counts the nonzero atoms and sums all of them.
GZ_HD Limits split_limits(const Water& water) {
  const double unit = power_of_two(water.exponent);
  if (water.stage == Filling::survey) return {unit, bits_double(kInfDoubleBits), 0.0};
  return {unit, water.at, water.at};
}

GZ_HD void survey_atoms(Water* water, const Split& all, double budget) {
  if (water->exponent == 0) {
    water->above = all.above;
    // A second time, scaled, so that sums of doubles do not overflow and denormals keep all their bits.
    if (all.rest > 0x1p900) water->exponent = -64;
    if (all.rest > 0.0 && all.rest < 0x1p-900) water->exponent = 512;
    if (water->exponent != 0) return;
  }
  if (!(all.rest < bits_double(kInfDoubleBits))) {
    water->stage = Filling::failed;
  } else if (double(water->above) <= budget) {
    *water = {Filling::done, 0, 0, 0.0, 0.0, water->above, 0.0, 0.0, 0.0};
  } else {
    const double level = all.rest / budget;
    *water = {Filling::rounds, 0,    water->exponent, bits_double(kInfDoubleBits), budget / all.rest, 0, 0.0,
              level,           level};
  }
}

GZ_HD void fit_level(Water* water, const Split& split, double budget) {
  const double left = budget - double(split.above), level = split.rest / left;
  const bool newton = water->at == water->level, same = split.above == water->above;
  // `at` is at or above the level: so is the new bound, and p = 1 for all magnitudes above `at`.
  const bool high = left > 0.0 && split.rest > 0.0 && level <= water->at;
  if (high) {
    const double factor = left / split.rest, most = bits_double(kInfDoubleBits - 1);
    water->threshold = water->at;
    water->factor = factor < most ? factor : most;
    water->above = split.above;
    water->level = level;
  } else {
    water->low = water->at;
  }
  // Newton's step goes below `low` only by rounding.
  if ((newton && (same || !high)) || !(water->low < water->level)) {
    water->stage = Filling::done;
    return;
  }
  water->at = water->level;
  if (++water->round > kNewtonRounds && water->round % 2 == 0) {
    const uint64_t low = double_bits(water->low), top = double_bits(water->level);
    if (top - low > 1) water->at = bits_double(low + (top - low) / 2);
  }
}

GZ_HD void fill_water(Water* water, const Split& split, double budget) {
  water->stage == Filling::survey ? survey_atoms(water, split, budget) : fit_level(water, split, budget);
}

GZ_HD double atom_probability(const Water& water, double magnitude) {
  const double m = magnitude * power_of_two(water.exponent), p = m * water.factor;
  return m > water.threshold || p > 1.0 ? 1.0 : p;
}

}  // namespace gradzip
