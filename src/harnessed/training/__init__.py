"""Training: turns recorded calls into samples, computes rollout-level advantages and losses, updates the policy."""
