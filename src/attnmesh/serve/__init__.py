"""A server of one model on a mesh: OpenAI's HTTP interface in a front process, apart from the ranks."""
