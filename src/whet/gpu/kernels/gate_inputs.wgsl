// x = act(x) times the token's inputs of layer layer[0], DIM elements.
@group(0) @binding(0) var<storage, read> inputs: array<f32>;
@group(0) @binding(1) var<storage, read> layer: array<u32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= DIM) { return; }
  let at = id.y * DIM + id.x;
  x[at] = activate(x[at], inputs[(id.y * N_LAYERS + layer[0]) * DIM + id.x]);
}
