// x = scale (x + DELTA_SCALE delta).
@group(0) @binding(0) var<storage, read> delta: array<f32>;
@group(0) @binding(1) var<storage, read> scale: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= D) { return; }
  let at = id.y * D + id.x;
  x[at] += DELTA_SCALE * delta[at];
  if (HAS_SCALE) { x[at] *= scale[0]; }
}
