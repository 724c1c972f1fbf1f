"""What the rooms agree on: tensors, error codes, version.yaml, policy.yaml, state.json and the shared state file."""
