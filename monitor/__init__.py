"""Numbers over time: samples, rules, alerts, the run directory and the outputs."""
