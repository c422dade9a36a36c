"""The bus between processes, over nng: a hub in the middle, and a client in each process."""
