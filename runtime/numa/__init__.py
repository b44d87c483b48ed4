"""Memory nodes: where pages are, who reads them, and how the work is divided so that every node reads its own."""
