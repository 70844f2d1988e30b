// The first DIM elements of a row of STRIDE become the activation of the gate in them and the up projection after them.
@group(0) @binding(0) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= DIM) { return; }
  let at = id.y * STRIDE + id.x;
  var up = 0.0;
  if (IS_GATED) { up = x[at + DIM]; }
  x[at] = activate(x[at], up);
}
