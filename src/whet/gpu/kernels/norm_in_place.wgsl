// Norms elements OFFSET ... OFFSET + D of rows of STRIDE elements.
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> bias: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = group.y * STRIDE + OFFSET;
  var mean = 0.0;
  if (IS_LAYER_NORM) {
    var sum = 0.0;
    for (var i = lane; i < D; i += 64u) { sum += x[row + i]; }
    mean = total(lane, sum) / f32(D);
  }
  var squares = 0.0;
  for (var i = lane; i < D; i += 64u) {
    let value = x[row + i] - mean;
    squares += value * value;
  }
  let scale = 1.0 / sqrt(total(lane, squares) / f32(D) + EPS);
  for (var i = lane; i < D; i += 64u) {
    var value = (x[row + i] - mean) * scale;
    if (HAS_NORM) { value *= weight[i]; }
    if (HAS_BIAS) { value += bias[i]; }
    x[row + i] = value;
  }
}
