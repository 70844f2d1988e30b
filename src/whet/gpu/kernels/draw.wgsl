// Draws a token of a row of N logits by inverse CDF: the first, by id, at which the cumulative probability exceeds the
// uniform number; or the most probable one. A lane sums a run of consecutive tokens.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> draws: array<vec4f>;  // 1 / temperature (0: greedy), uniform, 1 / the log-prob's
@group(0) @binding(2) var<storage, read_write> drawn: array<vec2u>;  // token, bits of its log-prob
const LANES = 256u;
const RUN = (N + LANES - 1u) / LANES;
const NOT_A_NUMBER = 0x7fc00000u;
var<workgroup> largest: array<f32, LANES>;
var<workgroup> first_largest: array<u32, LANES>;
var<workgroup> sums: array<f32, LANES>;
var<workgroup> reported: array<f32, LANES>;
var<workgroup> is_invalid: array<u32, LANES>;  // NaN or infinity, by their bits: compilers may assume that there are none

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = group.y * N;
  let begin = min(lane * RUN, N);
  let end = min(begin + RUN, N);
  var top = -3.4e38f;
  var top_at = begin;
  var invalid = 0u;
  for (var i = begin; i < end; i++) {
    let bits = bitcast<u32>(logits[row + i]);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
      if (bits != 0xff800000u) { invalid = 1u; }
      continue;
    }
    if (logits[row + i] > top) {
      top = logits[row + i];
      top_at = i;
    }
  }
  largest[lane] = top;
  first_largest[lane] = top_at;
  is_invalid[lane] = invalid;
  workgroupBarrier();
  for (var half = LANES / 2u; half > 0u; half /= 2u) {
    if (lane < half) {
      let other = lane + half;
      is_invalid[lane] |= is_invalid[other];
      if (largest[other] > largest[lane] ||
          (largest[other] == largest[lane] && first_largest[other] < first_largest[lane])) {
        largest[lane] = largest[other];
        first_largest[lane] = first_largest[other];
      }
    }
    workgroupBarrier();
  }
  let settings = draws[group.y];
  let most = largest[0];
  var sum = 0.0;
  var of_reported = 0.0;
  for (var i = begin; i < end; i++) {
    if (bitcast<u32>(logits[row + i]) == 0xff800000u) { continue; }
    sum += exp((logits[row + i] - most) * settings.x);
    of_reported += exp((logits[row + i] - most) * settings.z);
  }
  sums[lane] = sum;
  reported[lane] = of_reported;
  workgroupBarrier();
  if (lane > 0u) { return; }
  var total = 0.0;
  var reported_total = 0.0;
  for (var i = 0u; i < LANES; i++) {
    total += sums[i];
    reported_total += reported[i];
  }
  var token = first_largest[0];
  if (settings.x > 0.0) {
    let target_sum = settings.y * total;
    var before = 0.0;
    var at = 0u;
    while (at < LANES - 1u && before + sums[at] <= target_sum) {
      before += sums[at];
      at++;
    }
    for (var i = min(at * RUN, N); i < min(at * RUN + RUN, N); i++) {
      if (bitcast<u32>(logits[row + i]) == 0xff800000u) { continue; }
      let weight = exp((logits[row + i] - most) * settings.x);
      if (weight > 0.0) { token = i; }
      before += weight;
      if (before > target_sum) { break; }
    }
  }
  let logprob = (logits[row + token] - most) * settings.z - log(reported_total);
  let is_valid = is_invalid[0] == 0u && most > -3.4e38f;
  drawn[group.y] = vec2u(token, select(NOT_A_NUMBER, bitcast<u32>(logprob), is_valid));
}
