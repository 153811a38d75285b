"""Communication without a server: graphs, their mixing matrices and spectra."""
