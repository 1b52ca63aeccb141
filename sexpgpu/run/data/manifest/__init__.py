"""`(manifest location …)`: sharded data under a manifest of version 1: its schema, shards, reader and writer."""
