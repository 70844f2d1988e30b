// x += DELTA_SCALE delta, if ADDS; out = OUT_SCALE norm(x), or x without a norm.
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> bias: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;
@group(0) @binding(3) var<storage, read> delta: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = group.y * D;
  var sum = 0.0;
  var squares = 0.0;
  for (var i = lane; i < D; i += 64u) {
    var value = x[row + i];
    if (ADDS) {
      value += DELTA_SCALE * delta[row + i];
      x[row + i] = value;
    }
    sum += value;
    squares += value * value;
  }
  var mean = 0.0;
  var scale = 1.0;
  if (HAS_NORM) {
    if (IS_LAYER_NORM) {
      mean = total(lane, sum) / f32(D);
      squares = 0.0;
      for (var i = lane; i < D; i += 64u) {
        let value = x[row + i] - mean;
        squares += value * value;
      }
    }
    scale = 1.0 / sqrt(total(lane, squares) / f32(D) + EPS);
  }
  for (var i = lane; i < D; i += 64u) {
    var value = (x[row + i] - mean) * scale;
    if (HAS_NORM) { value *= weight[i]; }
    if (HAS_BIAS) { value += bias[i]; }
    out[row + i] = OUT_SCALE * value;
  }
}
