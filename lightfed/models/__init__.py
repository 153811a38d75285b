"""What a client trains: how modules are built, evaluated, split and formatted."""
