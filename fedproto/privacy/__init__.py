"""Privacy: differential privacy with exact claims, and secure sums; see docs/privacy.md."""
