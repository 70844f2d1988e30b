// Chooses N_USED experts for a token from the router's logits, the most probable first and of equal ones the first, and
// their weights; records the choice of the mixture layer layer[0].
@group(0) @binding(0) var<storage, read_write> probabilities: array<f32>;  // (tokens, N_EXPERTS): the logits
@group(0) @binding(1) var<storage, read> correction: array<f32>;
@group(0) @binding(2) var<storage, read> layer: array<u32>;
@group(0) @binding(3) var<storage, read_write> chosen: array<u32>;  // (tokens, N_USED)
@group(0) @binding(4) var<storage, read_write> chosen_weights: array<f32>;
@group(0) @binding(5) var<storage, read_write> recorded: array<u32>;  // (tokens, mixture layers, N_USED)
var<workgroup> keys: array<f32, N_EXPERTS>;
var<workgroup> best_keys: array<f32, 64>;
var<workgroup> best: array<u32, 64>;
var<workgroup> found: array<u32, N_USED>;
const TAKEN = -3.4e38f;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = group.y * N_EXPERTS;
  var largest = TAKEN;
  if (IS_SOFTMAX) {
    for (var e = 0u; e < N_EXPERTS; e++) { largest = max(largest, probabilities[row + e]); }
  }
  workgroupBarrier();
  var sum = 0.0;
  for (var e = lane; e < N_EXPERTS; e += 64u) {
    let logit = probabilities[row + e];
    keys[e] = select(1.0 / (1.0 + exp(-logit)), exp(logit - largest), IS_SOFTMAX);
  }
  workgroupBarrier();
  if (IS_SOFTMAX) {
    for (var e = 0u; e < N_EXPERTS; e++) { sum += keys[e]; }
  } else {
    sum = 1.0;
  }
  workgroupBarrier();
  for (var e = lane; e < N_EXPERTS; e += 64u) {
    probabilities[row + e] = keys[e] / sum;
    keys[e] = keys[e] / sum;
    if (HAS_CORRECTION) { keys[e] += correction[e]; }
  }
  workgroupBarrier();
  for (var j = 0u; j < N_USED; j++) {
    best_keys[lane] = TAKEN;
    best[lane] = 0xffffffffu;
    for (var e = lane; e < N_EXPERTS; e += 64u) {
      if (keys[e] > best_keys[lane]) {
        best_keys[lane] = keys[e];
        best[lane] = e;
      }
    }
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
      if (lane < half) {
        let other = lane + half;
        if (best_keys[other] > best_keys[lane] || (best_keys[other] == best_keys[lane] && best[other] < best[lane])) {
          best_keys[lane] = best_keys[other];
          best[lane] = best[other];
        }
      }
      workgroupBarrier();
    }
    if (lane == 0u) {
      found[j] = min(best[0], N_EXPERTS - 1u);
      keys[found[j]] = TAKEN;
    }
    workgroupBarrier();
  }
  storageBarrier();
  if (lane >= N_USED) { return; }
  var total = ROUTER_EPS;
  for (var j = 0u; j < N_USED; j++) { total += probabilities[row + found[j]]; }
  let factor = ROUTER_SCALE / select(1.0, total, IS_NORMALISED);
  chosen[group.y * N_USED + lane] = found[lane];
  chosen_weights[group.y * N_USED + lane] = factor * probabilities[row + found[lane]];
  recorded[(group.y * N_MOE_LAYERS + layer[0]) * N_USED + lane] = found[lane];
}
