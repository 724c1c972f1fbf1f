"""Whether a canary may go on: what was observed, the statistics over it, and the course of a rollout. Pure logic."""
