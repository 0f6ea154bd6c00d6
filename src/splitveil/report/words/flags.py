"""Names of the flags an audit can raise, and what to do about each."""

FLAGS = {
    "flag.white-box weaker than black-box": (
        "white-box weaker than black-box",
        "白盒攻击弱于黑盒攻击",
    ),
    "flag.decoder not converged": ("decoder not converged", "解码器未收敛"),
    "flag.gradients masked": ("gradients masked", "梯度被掩盖"),
    "flag.one draw of a random channel": ("one draw of a random channel", "随机信道只抽样一次"),
    "flag.noise only in training": ("noise only in training", "噪声仅在训练时存在"),
    "flag.linearly invertible": ("linearly invertible", "可线性反演"),
    "flag.attack overfitted": ("attack overfitted", "攻击过拟合"),
    "flag.certificate beaten": ("certificate beaten", "证书被突破"),
    "flag.values not finite": ("values not finite", "出现非有限值"),
    "flag.training unfinished": ("training unfinished", "训练未完成"),
    "flag.attacks left out": ("attacks left out", "有攻击未运行"),
    "flag.validation images scored": ("validation images scored", "评分用的是验证图像"),
    "flag.scored images known before": ("scored images known before", "评分图像事先已知"),
    "flag.noise missing on the wire": ("noise missing on the wire", "传输中没有噪声"),
    "flag.noise repeats on the wire": ("noise repeats on the wire", "传输中的噪声重复出现"),
    "flag.noise not as declared on the wire": (
        "noise not as declared on the wire",
        "传输中的噪声与声明不符",
    ),
    "flag.another client on the wire": ("another client on the wire", "发送数据的是另一个客户端"),
    "flag.more than z on the wire": ("more than z on the wire", "传输内容不止 z"),
    "flag.wire leaks more than the audit": (
        "wire leaks more than the audit",
        "实际传输的泄露多于审计结果",
    ),
    "advice.white-box weaker than black-box": (
        "raise the white-box attack's steps and restarts; the headline rests on the other attacks",
        "增加白盒攻击的步数和重启次数；首要数字依据的是其他攻击",
    ),
    "advice.decoder not converged": (
        "audit with a larger profile before believing the number",
        "采信该数字之前，用更大的审计档位重新审计",
    ),
    "advice.gradients masked": (
        "do not count the failure of white-box attacks as protection",
        "不要把白盒攻击的失败算作保护",
    ),
    "advice.one draw of a random channel": (
        "add k-query, or use a profile that has it",
        "加入 k-query 攻击，或使用包含它的审计档位",
    ),
    "advice.noise only in training": (
        "make the noise a channel stage, active in eval mode",
        "把噪声做成信道的一环，使其在推理模式下也生效",
    ),
    "advice.linearly invertible": (
        "treat the client as sending the image itself",
        "应视为客户端直接发送了图像本身",
    ),
    "advice.attack overfitted": (
        "give the attacker more aux images",
        "给攻击者更多辅助图像",
    ),
    "advice.certificate beaten": (
        "believe neither: the channel is not what the certificate was told it is",
        "两者都不要相信：信道与证书所假定的不符",
    ),
    "advice.training unfinished": (
        "continue it with --resume, then audit again: this is not the model that will be deployed",
        "用 --resume 继续训练后重新审计：这不是将要部署的模型",
    ),
    "advice.attacks left out": (
        "audit without --attacks before reporting the number",
        "报告该数字之前，请不带 --attacks 重新审计",
    ),
    "advice.validation images scored": (
        "choose, train once with --final, and report an audit of test images",
        "先用它选定设置，再用 --final 训练一次，并报告测试图像上的审计",
    ),
    "advice.scored images known before": (
        "take the copies out of one of the parts, train and audit again",
        "从其中一部分删去重复的图像，重新训练并审计",
    ),
    "advice.values not finite": (
        "mend the encoder; these images count as they are, attacked through zeros",
        "修复编码器；这些图像按现状计入，以零值代替后接受攻击",
    ),
    "advice.noise missing on the wire": (
        "do not use this client: switch its noise on, or audit a run with the noise it has",
        "不要使用该客户端：请打开噪声，或按其实际噪声重新审计",
    ),
    "advice.noise repeats on the wire": (
        "draw noise from the operating system's generator, without a seed",
        "改用操作系统的随机数发生器产生噪声，不设随机种子",
    ),
    "advice.noise not as declared on the wire": (
        "make the client's channel the one that was audited",
        "使客户端的信道与审计时一致",
    ),
    "advice.another client on the wire": (
        "deploy the encoder of this run, or audit the one that is deployed",
        "部署本次运行的编码器，或审计实际部署的编码器",
    ),
    "advice.more than z on the wire": (
        "send the tensor and its description alone",
        "只发送张量及其描述",
    ),
    "advice.wire leaks more than the audit": (
        "believe this record, and find out what the deployed client does differently",
        "以这份记录为准，并查明实际部署的客户端有何不同",
    ),
}
