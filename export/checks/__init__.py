"""What is checked and measured of a bundle: parity with the network, remembering, size and speed."""
