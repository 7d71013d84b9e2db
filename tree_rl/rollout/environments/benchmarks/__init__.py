"""Published benchmarks by name: rows as they are published, played and judged by each benchmark's own rule."""
