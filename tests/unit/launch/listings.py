"""What `nvidia-smi -L` has printed on real machines, by drivers of several years."""

#: Eight GPUs of one model.
H100 = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-c7a0294c-c2c2-5476-438c-fb468eaa223b)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-27196ced-a067-4406-2159-46448710fc9c)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-0d9ce0d5-22a0-fdf7-c891-f26e86f907b6)
GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-7353c83a-0617-7238-ca5a-9b9c80212c46)
GPU 4: NVIDIA H100 80GB HBM3 (UUID: GPU-b71a1811-5b24-ae65-9a8f-4118c7c1db31)
GPU 5: NVIDIA H100 80GB HBM3 (UUID: GPU-4a360bd8-44cd-43cb-9dc8-1b47ce52e162)
GPU 6: NVIDIA H100 80GB HBM3 (UUID: GPU-590d9f08-faf1-6a7d-70a1-b15156fd95aa)
GPU 7: NVIDIA H100 80GB HBM3 (UUID: GPU-5534d557-2a95-300a-81e6-7b626d87378a)
"""

#: One GPU of four is split.
H100_WITH_MIG = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-d6a2c177-4cd8-8d01-0310-79f2720f37de)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-75c4ee16-a840-6f6c-9a7b-5ed8f41598b8)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-879a110e-54dc-22fe-9699-5babde1d450e)
GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-5ea04b20-4cc3-4d84-0bb2-e4143be8e874)
  MIG 2g.20gb     Device  0: (UUID: MIG-55d07ceb-ef71-58e0-87c2-0477d96fa03f)
"""

#: The only GPU is split.
A100_WITH_MIG = """\
GPU 0: NVIDIA A100-PCIE-40GB (UUID: GPU-84fd49f2-48ad-50e8-9f2e-3bf0dfd47ccb)
  MIG 2g.10gb     Device  0: (UUID: MIG-41b3359c-e721-56e5-8009-12e5797ed514)
  MIG 2g.10gb     Device  1: (UUID: MIG-65b79fff-6d3c-5490-a288-b31ec705f310)
  MIG 2g.10gb     Device  2: (UUID: MIG-c6e2bae8-46d4-5a7e-9a68-c6cf1f680ba0)
"""

#: Drivers before 470 wrote MIG devices with the GPU's id and two numbers.
A100_IN_2021 = """\
GPU 0: A100-PCIE-40GB (UUID: GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23)
  MIG 4g.20gb Device 0: (UUID: MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/2/0)
  MIG 2g.10gb Device 1: (UUID: MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/3/0)
"""

#: The first driver that knew MIG, on a GPU without a name yet.
A100_IN_2020 = """\
GPU 0: Graphics Device (UUID: GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5)
  MIG Device 0: (UUID: MIG-GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5/1/0)
"""

#: Two models: CUDA may count them in a different order.
QUADROS = """\
GPU 0: Quadro P5000 (UUID: GPU-25049053-61b4-ad49-1f96-3ae7df7afbd3)
GPU 1: Quadro P2000 (UUID: GPU-1029c3f5-cd59-692d-f38f-902ac67a351d)
"""
