// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7.
fn erf(x: f32) -> f32 {
  let t = 1.0 / (1.0 + 0.3275911 * abs(x));
  let p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return sign(x) * (1.0 - p * exp(-x * x));
}

fn silu(z: f32) -> f32 { return z / (1.0 + exp(-z)); }

// act(gate) * up, or act(gate) without gates. KIND: the core's Activation.
fn activate(gate: f32, up: f32) -> f32 {
  var z = gate;
  switch KIND {
    case 0u: { z = silu(z); }
    case 1u: { z = 0.5 * z * (1.0 + erf(z * 0.70710678)); }
    case 2u: { z = 0.5 * z * (1.0 + tanh(clamp(0.79788456 * (z + 0.044715 * z * z * z), -20.0, 20.0))); }
    case 3u: { z = max(z, 0.0) * max(z, 0.0); }
    default: {
      z = min(z, 7.0);
      return z / (1.0 + exp(-1.702 * z)) * (clamp(up, -7.0, 7.0) + 1.0);
    }
  }
  if (IS_GATED) { z *= up; }
  return z;
}
