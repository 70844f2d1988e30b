// y = x w^T + bias of the chosen experts: row r is expert r % N_USED of token r / N_USED. `weights` has the same part of
// experts FIRST_EXPERT ... FIRST_EXPERT + EXPERTS: outputs FIRST ... FIRST + COUNT of each.
@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> chosen: array<u32>;
var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let expert = chosen[group.y];
  if (expert < FIRST_EXPERT || expert >= FIRST_EXPERT + EXPERTS) { return; }
  let panel = (expert - FIRST_EXPERT) * ((COUNT + 15u) / 16u) + group.x;
  let row = select(group.y, group.y / N_USED, IS_BY_TOKEN);
  let j = lane % 16u;
  var sum = 0.0;
  for (var step = lane / 16u; step < (K + 31u) / 32u; step += 4u) {
    let s = scales(panel, step, j);
    var part = vec4f(0.0);  // of the weights' integers, then of the inputs
    for (var w = 0u; w < 4u; w++) {
      let u = integers(panel, step, w, j);
      let low = inputs(row, 32u * step + 4u * w);
      let high = inputs(row, 32u * step + 16u + 4u * w);
      part += vec4f(dot(u.low, low), dot(u.high, high), dot(low, vec4f(1.0)), dot(high, vec4f(1.0)));
    }
    sum += dot(s, part);
  }
  sums[lane] = sum;
  workgroupBarrier();
  let output = 16u * group.x + lane;
  if (lane >= 16u || output >= COUNT) { return; }
  var value = sums[lane] + sums[lane + 16u] + sums[lane + 32u] + sums[lane + 48u];
  if (HAS_BIAS) { value += bias[expert * Y_STRIDE + FIRST + output]; }
  y[group.y * Y_STRIDE + FIRST + output] = value;
}
