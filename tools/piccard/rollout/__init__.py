"""`piccard rollout`: runs a rollout over a service, or over synthetic traffic."""
