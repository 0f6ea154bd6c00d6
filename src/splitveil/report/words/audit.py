"""Words for what a record holds: access, remarks, certificates, leaks beyond pixels."""

AUDIT = {
    "access.none": ("none", "无"),
    "access.label": ("label", "标签"),
    "access.black-box": ("black-box", "黑盒"),
    "access.white-box": ("white-box", "白盒"),
    "access.repeats": ("repeats", "多次发送"),
    "remark.draws": ("{count} draws", "{count} 次发送"),
    "remark.images": ("{count} images", "{count} 张图像"),
    "remark.beside": ("{count} images, {attack} {mse}", "{count} 张图像，{attack} {mse}"),
    "flags.none": ("none", "无"),
    "flags.brief": ("{profile} audit", "{profile} 档位审计"),
    "certificate.capacity": ("capacity", "容量证书"),
    "certificate.gallery": ("gallery", "图库证书"),
    "certificate.population": ("population", "总体证书"),
    "certificate.refused": ("refused", "未出具"),
    "certificate.empty": ("vacuous", "无约束力"),
    "certificate.vacuous": ("{value}, vacuous", "{value}，无约束力"),
    "certificate.vacuous-in-part": (
        "{value}, vacuous in {some} of {all} seeds",
        "{value}，{all} 个种子中有 {some} 个无约束力",
    ),
    "caption.audit": (
        "Flags are signs that a number should not be believed as it stands. Certificates bound "
        "what anybody can learn, in nats; lower says more. Refused: a condition does not hold. "
        "Vacuous: it holds and excludes nothing. –: not asked for.",
        "警示表明某个数字不宜照单全收。证书给出任何人所能获知信息量的上界（奈特），越低越有力。"
        "未出具：条件不满足。无约束力：成立，但什么也不能排除。–：未要求。",
    ),
    "repeats.doubles": ("leakage doubles", "泄露翻倍"),
    "repeats.attack": ("attack", "攻击"),
    "repeats.images": ("images", "图像数"),
    "repeats.between": ("between {after} and {by} sendings", "发送 {after} 到 {by} 次之间"),
    "repeats.at": ("at {by} sendings", "发送 {by} 次时"),
    "repeats.never": ("not within {most}", "{most} 次以内不会"),
    "repeats.cannot": ("cannot: more than half leaks already", "不可能：泄露已超过一半"),
    "repeats.nothing": ("nothing leaks to double", "没有可翻倍的泄露"),
    "repeats.later": (
        "nothing leaks at one sending; something at {by}",
        "发送一次没有泄露；发送 {by} 次时有",
    ),
    "repeats.caption": (
        "Leakage 1 − MSE / ceiling of one attack that is given the mean of k sendings of each "
        "image and was fitted on such means; the most that up to k sendings give. It doubles where "
        "it is twice that of one sending. A stronger attack may need fewer; a client that sends "
        "the same draw again gives nothing more.",
        "同一种攻击得到每张图像 k 次发送的平均值（也以这样的平均值拟合）时的泄露 1 − MSE / 上限；"
        "取不超过 k 次发送的最大值。达到单次发送的两倍即为翻倍。更强的攻击可能只需更少次数；"
        "重复发送同一次抽样的客户端不会多泄露。",
    ),
    "leaks.row": ("row", "运行"),
    "leaks.re-id-wire": ("re-id by z̃", "凭 z̃ 重识别"),
    "leaks.re-id-encoder": ("re-id, knows the encoder", "知道编码器的重识别"),
    "leaks.re-id-picture": ("re-id by picture", "凭重建图重识别"),
    "leaks.member-outputs": ("membership, outputs", "成员推断（输出）"),
    "leaks.member-wire": ("membership, z̃", "成员推断（z̃）"),
    "leaks.attribute": ("attribute beyond answer", "答案之外的属性"),
    "leaks.gallery": ("rate of the gallery", "图库信息率"),
    "leaks.certified": ("certified", "证书上界"),
    "leaks.doubles": ("doubles at", "翻倍次数"),
    "leaks.caption": (
        "Re-identification: share of the n scored images found at once among all n, chance 1/n; by "
        "z̃: by an attacker who only queries the client; knows the encoder: by the best matcher "
        "there is, who has every image's z and the noise; by picture: from the "
        "reconstructions of the strongest black-box attack or of `linear`, whichever finds more. "
        "Membership: AUC of the strongest score, "
        "chance .5. Attribute: the largest share of images whose attribute z̃ tells and the answer "
        "does not. Rate and certified: nats about an image given its class, over the scored "
        "images and, at 95 % confidence, for images like them; refused without noise. Vacuous: "
        "with the nats of the class it reaches log n, all that naming one of n images takes (for "
        "certified: log n − log 2, where Fano's bound ends), and excludes nothing. Doubles at: "
        "sendings of one image until its gallery's bound is twice as large.",
        "重识别：一次就从全部 n 张评分图像中找出所发送图像的比例，随机水平为 1/n。凭 z̃："
        "攻击者只能查询客户端；知道编码器：可能的最优匹配者，掌握每张图像的 z 和噪声；"
        "凭重建图：最强黑盒攻击或 `linear` 的重建图，取找出更多者。成员推断："
        "最强得分的 AUC，随机水平为 .5。属性：z̃ 能说明而答案不能说明其属性的图像的最大比例。"
        "信息率与证书上界："
        "已知类别时关于一张图像的奈特数，前者针对评分图像，后者针对同类图像，置信度 95 %；"
        "无噪声时不出具。无约束力："
        "加上类别的奈特数后达到 log n，即从 n 张图像中指明一张所需的全部信息（证书上界为"
        " log n − log 2），因而什么也不能排除。翻倍次数："
        "同一图像发送多少次后，"
        "图库上界增至两倍。",
    ),
    "leaks.sendings-note": (
        "Re-id by z̃, how often the attacker had sent each known image before: {told}.",
        "凭 z̃ 重识别的攻击者此前发送每张已知图像的次数：{told}。",
    ),
    "leaks.sendings": ("{n} times for {rows}", "{rows} 为 {n} 次"),
    "leaks.sendings-left-out": (
        "of {row} the mean is over {some} of {all} training seeds, for in the other records it was "
        "{n}",
        "{row} 只取 {all} 个训练种子中 {some} 个的平均，其余记录为 {n} 次",
    ),
    "leaks.chance": ("Here n is {n}: chance {share} %.", "此处 n 为 {n}，随机水平 {share} %。"),
}
