// The first DIM elements of a row of STRIDE become act(gate) * up, or act(gate) without gates.
@group(0) @binding(0) var<storage, read_write> x: array<f32>;

// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7.
fn erf(x: f32) -> f32 {
  let t = 1.0 / (1.0 + 0.3275911 * abs(x));
  let p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return sign(x) * (1.0 - p * exp(-x * x));
}

fn act(z: f32) -> f32 {
  switch KIND {
    case 0u: { return z / (1.0 + exp(-z)); }
    case 1u: { return 0.5 * z * (1.0 + erf(z * 0.70710678)); }
    case 2u: { return 0.5 * z * (1.0 + tanh(clamp(0.79788456 * (z + 0.044715 * z * z * z), -20.0, 20.0))); }
    default: { return max(z, 0.0) * max(z, 0.0); }
  }
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= DIM) { return; }
  let at = id.y * STRIDE + id.x;
  var value = act(x[at]);
  if (IS_GATED) { value *= x[at + DIM]; }
  x[at] = value;
}
